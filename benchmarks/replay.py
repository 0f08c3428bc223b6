"""Replay of traces on simulated replicas without a real model; see `quire.cluster.simulation`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.trace import Trace
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.cluster.simulation.fleet import SimulatedFleet, SimulatedRequest, Watcher
from quire.cluster.simulation.replica import SimulatedReplica
from quire.cluster.simulation.step_time import Device, ModelCost, StepTime
from quire.cluster.simulation.traces import VOCAB_SIZE
from quire.proto.config import EngineConfig, ModelConfig

# More waiting requests than any trace has.
NO_LIMIT = 1_000_000


def roofline(
    flops_per_token: float = 16e9,
    flops_per_s: float = 600e12,
    weight_bytes: float = 16e9,
    kv_bytes_per_token: float = 131_072,
    bytes_per_s: float = 3.35e12,
) -> StepTime:
    """Return the lower bound of a step's time (Williams et al., 2009): its arithmetic and its memory traffic.

    The defaults are a Llama of 8 billion parameters in bfloat16 on one NVIDIA H100, at 60 % of its arithmetic.
    """
    cost = ModelCost(weight_bytes, flops_per_token, kv_bytes_per_token)
    return StepTime(cost, Device("roofline", flops_per_s, bytes_per_s, 1.0))


def busy_s(trace: Trace, step_time: StepTime) -> float:
    """Return the seconds that a trace's prompts and KV reads take with perfect batching."""
    cost, device = step_time.cost, step_time.device
    num_prompt = sum(request.num_prompt_tokens for request in trace.requests)
    num_read = sum(
        request.num_output_tokens * (request.num_prompt_tokens + request.num_output_tokens / 2)
        for request in trace.requests
    )
    return (
        num_prompt * cost.flops_per_token / device.flops_per_s
        + num_read * cost.kv_bytes_per_token / device.bytes_per_s
    )


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """A simulated replica without a real model: by default on one NVIDIA H100.

    Attributes:
        num_blocks: size of the pool, without the scratch block.
        max_num_seqs: most sequences that run at once.
        max_model_len: longest sequence.
        cold_start_s: from the start to the first token, on a running node that has the weights.
    """

    step_time: StepTime = field(default_factory=roofline)
    num_blocks: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    max_queue_len: int = 4096
    policy: str = "fcfs"
    prefix_caching: bool = True
    cold_start_s: float = 30.0

    def config(self) -> EngineConfig:
        """Return the replica's configuration."""
        model = ModelConfig(
            path="", name="none", architecture="", hf={}, dtype="bfloat16", max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
        )  # fmt: skip
        options = EngineOptions(
            "none",
            num_kv_blocks=self.num_blocks + 1,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_len=self.max_queue_len,
            policy=self.policy,
            prefix_caching=self.prefix_caching,
        )
        return engine_config(options, model)


class Ended(Watcher):
    """Keeps the requests that ended, in that order. Raises AssertionError if one failed."""

    def __init__(self) -> None:
        self.requests: list[SimulatedRequest] = []

    def on_end(self, request: SimulatedRequest) -> None:
        assert not request.error, f"a request failed: {request.error}"
        self.requests.append(request)


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        requests: in the order of their ends.
        seconds: in which steps were computed.
        mean_running: running sequences, averaged over these.
        num_left_out: requests that were not sent because the pool cannot hold them.
        num_steps, num_preemptions: counts of the whole replay.
    """

    requests: list[SimulatedRequest]
    seconds: float
    mean_running: float
    num_left_out: int
    num_steps: int
    num_preemptions: int

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompts' tokens that were cached when their sequence first ran."""
        num_prompt_tokens = sum(each.traced.num_prompt_tokens for each in self.requests)
        return sum(each.num_cached_tokens for each in self.requests) / num_prompt_tokens


def replay(trace: Trace, num_blocks: int, num_rows: int = 256, num_state_slots: int | None = None) -> Replay:
    """Serve all requests of a trace on one replica, with outputs of the lengths in the trace.

    Args:
        num_blocks: size of the pool, of 16 tokens each, without the scratch block.
        num_rows: most sequences that run at once.
        num_state_slots: of a model whose layers keep states; None for one without.
    """
    model = ReplicaModel(
        num_blocks=num_blocks,
        max_num_seqs=num_rows,
        max_model_len=trace.max_tokens,
        max_queue_len=NO_LIMIT,
    )
    config = model.config()
    if num_state_slots is not None:
        cache = replace(config.cache, num_state_slots=num_state_slots)
        config = replace(config, model=replace(config.model, has_states=True), cache=cache)
    fitting = [request for request in trace.requests if request.num_tokens <= config.max_servable_tokens]
    seconds = weighted = 0.0

    def on_elapsed(replica: SimulatedReplica, elapsed_s: float) -> None:
        nonlocal seconds, weighted
        seconds += elapsed_s
        weighted += elapsed_s * replica.scheduler.num_running

    ended = Ended()
    cost = SimulatedFleet(config, model.step_time, ended, on_elapsed=on_elapsed).run(fitting)
    num_left_out = len(trace.requests) - len(fitting)
    return Replay(
        ended.requests, seconds, weighted / seconds, num_left_out, cost.num_steps, cost.num_preemptions
    )
