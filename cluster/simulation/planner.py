"""Planner: the cheapest replicas that serve a trace within latency targets, found by simulating it on many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...proto.errors import ConfigError, QuireError
from ..config.deployment import ScalingLimits
from ..config.engine_options import EngineOptions
from .engine import Models, SimulatedEngine, make_engine
from .fleet import PrefillRole, SimulatedRequest
from .run import Run, Summary, Targets, run_trace
from .traces import TracedRequest

# Of a GPU-hour, in dollars: about what providers ask in 2026. A file of prices replaces them.
ASSUMED_PRICES = {"h200": 3.8, "h100": 2.9, "b200": 5.5, "a100": 1.8, "l4": 0.7, "cpu": 0.1}
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
BLOCK_SIZES = (16, 32)
CHUNKS = (2048, 8192)
# Bytes per second at which a rank reads KV from another replica, unless measured.
ASSUMED_KV_RATE = 20e9
# Share of requests, and of tokens, that may miss a target.
_MISSES = 0.01


class _TargetMissed(Exception):
    """More than one percent of a trace's requests or tokens have missed a target already."""


@dataclass(frozen=True, slots=True)
class TraceSize:
    """Totals of a trace."""

    num_requests: int
    num_output_tokens: int

    @staticmethod
    def of(requests: Iterable[TracedRequest]) -> TraceSize:
        """Count a trace."""
        num_requests = num_tokens = 0
        for request in requests:
            num_requests += 1
            num_tokens += request.num_output_tokens
        return TraceSize(num_requests, num_tokens)


@dataclass(slots=True)
class BoundedSummary(Summary):
    """Summary that ends a run, by _TargetMissed, as soon as it cannot meet its targets any more.

    Attributes:
        size: of the whole trace.
    """

    size: TraceSize = field(default_factory=lambda: TraceSize(0, 0))
    num_late: int = 0
    num_slow: int = 0

    def on_first_token(self, request: SimulatedRequest, now: float) -> None:
        Summary.on_first_token(self, request, now)
        if self.targets.ttft_s is not None and now - request.traced.arrival_s > self.targets.ttft_s:
            self.num_late += 1
            if self.num_late > _MISSES * self.size.num_requests:
                raise _TargetMissed("first tokens are late")

    def on_gap(self, seconds: float, count: int = 1) -> None:
        Summary.on_gap(self, seconds, count)
        if self.targets.itl_s is not None and seconds > self.targets.itl_s:
            self.num_slow += count
            if self.num_slow > _MISSES * max(1, self.size.num_output_tokens - self.size.num_requests):
                raise _TargetMissed(
                    f"more than 1 % of tokens come {self.targets.itl_s:g} s after the one before"
                )

    def on_gaps(self, gaps: Sequence[float], count: int) -> None:
        for seconds in gaps:
            self.on_gap(seconds, count)

    def on_end(self, request: SimulatedRequest) -> None:
        Summary.on_end(self, request)
        if request.error:
            raise _TargetMissed(f"a request failed: {request.error}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Replicas that were tried.

    Attributes:
        run: None if it was not simulated to its end.
        price_per_hour: of a GPU.
        problem: why it does not serve; empty if it meets the targets.
        prefill: replicas that compute prompts for the others; None for replicas of one role.
    """

    gpu: str
    tensor_parallel_size: int
    block_size: int
    chunk: int
    limits: ScalingLimits
    price_per_hour: float
    run: Run | None = None
    problem: str = ""
    prefill: PrefillRole | None = None

    @property
    def num_least(self) -> int:
        """Return the replicas that run at any time."""
        return self.limits.min_replicas + (0 if self.prefill is None else self.prefill.num_replicas)

    @property
    def cost_per_hour(self) -> float:
        """Return the mean price of the replicas that ran; infinite if it was not simulated to its end."""
        if self.run is None:
            return float("inf")
        return self.price_per_hour * self.run.gpu_hours / max(1e-9, self.run.cost.end_s / 3600)

    @property
    def replicas(self) -> str:
        low, high = self.limits.min_replicas, self.limits.max_replicas
        if self.prefill is not None:
            return f"{low}+{self.prefill.num_replicas}"
        return str(low) if low == high else f"{low} to {high}"

    def figures(self) -> dict[str, Any]:
        """Return the candidate as JSON has it."""
        return {
            "gpu": self.gpu,
            "tensor_parallel_size": self.tensor_parallel_size,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.chunk,
            "min_replicas": self.limits.min_replicas,
            "max_replicas": self.limits.max_replicas,
            "prefill_replicas": 0 if self.prefill is None else self.prefill.num_replicas,
            "problem": self.problem,
            "cost_per_hour": None if self.run is None else self.cost_per_hour,
            "ttft_p99_s": None if self.run is None else self.run.summary.ttft.quantile(0.99),
            "itl_p99_s": None if self.run is None else self.run.summary.itl.quantile(0.99),
        }


class Planner:
    """Tries replicas on a trace.

    Args:
        options: of the engine, without those that the planner chooses.
        trace: is iterated over again and again.
        prices: GPU |-> dollars per hour; only these GPUs are tried.
        coefficients: GPU |-> file of `quire calibrate`.
        limits: bounds and delays of the autoscaler; `max_replicas` bounds all fleets.
        kv_bytes_per_s: at which a rank reads KV from another replica, for replicas of two roles.
        on_candidate: called with each candidate that was tried.
    """

    def __init__(
        self,
        options: EngineOptions,
        trace: Iterable[TracedRequest],
        targets: Targets,
        prices: Mapping[str, float],
        limits: ScalingLimits,
        *,
        coefficients: Mapping[str, Path] | None = None,
        shares_prefixes: bool = True,
        kv_bytes_per_s: float = ASSUMED_KV_RATE,
        on_candidate: Callable[[Candidate], None] = lambda candidate: None,
    ) -> None:
        self._options, self._trace, self._targets, self._prices = options, trace, targets, prices
        self._limits, self._coefficients = limits, coefficients or {}
        self._shares_prefixes, self._on_candidate = shares_prefixes, on_candidate
        self._kv_bytes_per_s = kv_bytes_per_s
        self._size = TraceSize.of(trace)
        self._models = Models()
        self.tried: list[Candidate] = []

    def plan(self) -> Candidate | None:
        """Return the cheapest candidate that meets the targets; None if there is none. `tried` has all of them."""
        for gpu in sorted(self._prices, key=lambda name: self._prices[name]):
            for size in TENSOR_PARALLEL_SIZES:
                for chunk in CHUNKS:
                    self._smallest_fleet(gpu, size, BLOCK_SIZES[0], chunk)
        best = self._best()
        if best is None:
            return None
        for block_size in BLOCK_SIZES[1:]:
            self._smallest_fleet(best.gpu, best.tensor_parallel_size, block_size, best.chunk)
        best = self._best()
        assert best is not None
        self._try_autoscaling(best)
        for fixed in self._smallest_that_serve():
            self._try_roles(fixed)
        return self._best()

    def _best(self) -> Candidate | None:
        serving = [each for each in self.tried if not each.problem]
        return min(serving, key=lambda each: each.cost_per_hour, default=None)

    def _smallest_fleet(self, gpu: str, size: int, block_size: int, chunk: int) -> None:
        """Try fixed fleets by bisection, up to the first that meets the targets or costs more than the best."""
        fixed = replace(self._limits, min_replicas=1, max_replicas=1)
        candidate = Candidate(gpu, size, block_size, chunk, fixed, self._prices[gpu])
        try:
            engine = self._engine(candidate)
        except QuireError as error:
            self._add(replace(candidate, problem=str(error)))
            return
        low, high, found = 0, 1, False
        while not found and high <= self._limits.max_replicas:
            tried = self._try(engine, self._sized(candidate, high))
            if tried is None:
                return
            found = not tried.problem
            if not found:
                low, high = high, 2 * high
        if not found:
            high = min(high, self._limits.max_replicas + 1)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._try(engine, self._sized(candidate, middle))
            if tried is None:
                return
            low, high = (middle, high) if tried.problem else (low, middle)

    def _try_autoscaling(self, fixed: Candidate) -> None:
        """Try whether fewer replicas are enough at times."""
        num_replicas = fixed.limits.max_replicas
        if num_replicas == 1 and self._limits.max_replicas == 1:
            return
        most = min(self._limits.max_replicas, 2 * num_replicas)
        engine = self._engine(fixed)
        for fewest in sorted({max(1, num_replicas // 2), num_replicas}):
            if fewest < most:
                self._try(
                    engine,
                    replace(fixed, limits=replace(self._limits, min_replicas=fewest, max_replicas=most)),
                )

    def _smallest_that_serve(self) -> list[Candidate]:
        """Return the smallest fixed fleet that serves of each GPU, tensor-parallel size and chunk, cheapest first."""
        found: dict[tuple[str, int, int], Candidate] = {}
        for each in cheapest_first(self.tried):
            if not each.problem and each.limits.min_replicas == each.limits.max_replicas:
                found.setdefault((each.gpu, each.tensor_parallel_size, each.chunk), each)
        return list(found.values())

    def _try_roles(self, fixed: Candidate) -> None:
        """Try whether fewer replicas are enough if some of them compute prompts alone: fewer as long as they are."""
        engine = self._engine(fixed)
        for total in range(fixed.limits.max_replicas - 1, 1, -1):
            serves = False
            for num_prefill in range(1, 1 + total // 2):
                role = PrefillRole(num_prefill, self._kv_bytes_per_s)
                split = replace(self._sized(fixed, total - num_prefill), prefill=role)
                tried = self._try(engine, split)
                serves = tried is not None and not tried.problem
                if serves:
                    break
            if not serves:
                return

    def _sized(self, candidate: Candidate, num_replicas: int) -> Candidate:
        limits = replace(self._limits, min_replicas=num_replicas, max_replicas=num_replicas)
        return replace(candidate, limits=limits)

    def _engine(self, candidate: Candidate) -> SimulatedEngine:
        options = replace(
            self._options,
            tensor_parallel_size=candidate.tensor_parallel_size,
            block_size=candidate.block_size,
            max_num_batched_tokens=candidate.chunk,
        )
        return make_engine(options, candidate.gpu, self._coefficients.get(candidate.gpu), self._models)

    def _try(self, engine: SimulatedEngine, candidate: Candidate) -> Candidate | None:
        """Simulate a candidate; return None, and note why, if the best so far never costs more."""
        best = self._best()
        least = candidate.price_per_hour * engine.num_gpus * candidate.num_least
        if best is not None and least >= best.cost_per_hour:
            self._add(replace(candidate, problem="costs more"))
            return None
        try:
            summary = BoundedSummary(self._targets, size=self._size)
            run = run_trace(
                engine,
                self._trace,
                candidate.limits,
                shares_prefixes=self._shares_prefixes,
                summary=summary,
                prefill=candidate.prefill,
            )
            candidate = replace(candidate, run=run)
        except _TargetMissed as missed:
            candidate = replace(candidate, problem=str(missed))
        self._add(candidate)
        return candidate

    def _add(self, candidate: Candidate) -> None:
        self.tried.append(candidate)
        self._on_candidate(candidate)


def cheapest_first(tried: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates in order: those that serve by cost, then the others."""
    return sorted(tried, key=lambda each: (bool(each.problem), each.cost_per_hour))


def check_prices(prices: Mapping[str, Any]) -> dict[str, float]:
    """Return prices by GPU. Raises ConfigError if one is not a positive number."""
    for gpu, price in prices.items():
        if not isinstance(price, int | float) or not price > 0:
            raise ConfigError(
                f"the price of {gpu} is {price!r}, must be a positive number of dollars per hour"
            )
    return {gpu: float(price) for gpu, price in prices.items()}
