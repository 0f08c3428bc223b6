"""Goodput of a replica under more load than it can serve.

    python -m benchmarks.overload --json benchmarks/results/overload.json

Goodput counts the output tokens per second of requests that were complete before their deadline; without deadlines,
of all that were complete. ``simulated`` is a Llama of 8 billion parameters on one NVIDIA H100 in simulated time, with
the scheduler that serves (`benchmarks.overload_model`); its figures are the same on every machine.

The sustainable load is the highest of RATES at which 99 % of the requests are complete in time. A figure `at_10x` is
the goodput at 10 times that load over the peak of all loads. Without deadlines, and if no rate is sustained, it is
taken as ASSUMED_RATE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.common import Figure, make_parser, report
from benchmarks.overload_model import OVERLOADED, Call, Load, Phase, serve
from benchmarks.replay import ReplicaModel

# Requests per second.
RATES = (40.0, 45.0, 50.0, 55.0, 60.0, 65.0, 70.0, 90.0, 120.0, 180.0)
# Goodput without deadlines grows up to this rate.
ASSUMED_RATE = 60.0
SECONDS, WARM_UP_S = 40.0, 5.0
TIMEOUT_S = 3.0
SUSTAINED_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of load.

    Attributes:
        note: the load in words.
    """

    load: Load
    note: str
    model: ReplicaModel = field(default_factory=ReplicaModel)


_DEADLINE = Load((), timeout_s=TIMEOUT_S)
CASES = {
    "deadline": Case(_DEADLINE, f"deadlines of {TIMEOUT_S:g} s, outputs end by length"),
    "stops": Case(
        replace(_DEADLINE, max_tokens_factor=4.0),
        f"deadlines of {TIMEOUT_S:g} s, outputs stop at 1/4 of max_tokens",
    ),
    "retries": Case(
        replace(_DEADLINE, retries=True), "refused clients come back after the delay of their errors"
    ),
    "memory": Case(_DEADLINE, "KV memory for 30 sequences", ReplicaModel(num_blocks=700)),
    "none": Case(Load(()), "no deadlines"),
}


def simulate(case: Case, rate: float) -> tuple[float, list[Call]]:
    """Return the goodput at a rate, and the calls that had the time to end."""
    load = replace(case.load, phases=(Phase(SECONDS, rate),))
    outcome = serve(load, case.model)
    return outcome.goodput(WARM_UP_S, SECONDS), outcome.between(WARM_UP_S, SECONDS - TIMEOUT_S)


def share_good(calls: Iterable[Call]) -> float:
    """Return the share of calls that were complete in time."""
    return float(np.mean([call.is_good for call in calls]))


def measure_case(name: str, case: Case) -> dict[str, Figure]:
    results = {rate: simulate(case, rate) for rate in RATES}
    sustained = [rate for rate, (_, calls) in results.items() if share_good(calls) >= SUSTAINED_SHARE]
    sustainable = max(sustained) if case.load.timeout_s is not None and sustained else ASSUMED_RATE
    goodput, calls = simulate(case, 10 * sustainable)
    peak = max(goodput, *(goodput for goodput, _ in results.values()))
    prefix = f"overload.simulated.{name}"
    figures = {
        f"{prefix}.sustainable": Figure(sustainable, "requests/s", case.note),
        f"{prefix}.peak": Figure(peak, "tokens/s"),
        f"{prefix}.at_10x": Figure(
            100 * goodput / peak, "%", "goodput at 10 times the sustainable load, of the peak"
        ),
        f"{prefix}.wasted": Figure(
            100 * _wasted(calls), "%", "tokens of calls that were not complete in time"
        ),
    }
    refused = [call for call in calls if call.error == OVERLOADED and call.ended_at is not None]
    if refused and not case.load.retries:
        delays_ms = [1e3 * ((call.ended_at or 0.0) - call.arrived_at) for call in refused]
        for share in (50, 99):
            figures[f"{prefix}.refusal_ms_p{share}"] = Figure(float(np.percentile(delays_ms, share)), "ms")
    return figures


def _wasted(calls: list[Call]) -> float:
    wasted = sum(call.num_received for call in calls if call.error)
    return wasted / max(1, sum(call.num_received for call in calls))


def measure_fairness() -> dict[str, Figure]:
    """One tenant sends 10 times the sustainable load, another one 5 % of it."""
    figures: dict[str, Figure] = {}
    for policy in ("fair", "fcfs"):
        load = replace(
            _DEADLINE, phases=(Phase(SECONDS, 500.0),), tenants=(("greedy", 497.5), ("light", 2.5))
        )
        calls = serve(load, ReplicaModel(policy=policy)).between(WARM_UP_S, SECONDS - TIMEOUT_S)
        share = share_good(call for call in calls if call.tenant == "light")
        figures[f"overload.simulated.light_tenant.{policy}"] = Figure(
            100 * share,
            "%",
            "of its calls complete in time, beside a tenant with 10 times the sustainable load",
        )
    return figures


def measure_recovery() -> dict[str, Figure]:
    """Return the time after which a replica serves 95 % of the calls again, after 20 s of 10 times the load."""
    figures: dict[str, Figure] = {}
    for name, retries in (("after", False), ("after_retries", True)):
        load = replace(_DEADLINE, retries=retries, phases=(Phase(20.0, 500.0), Phase(SECONDS, 45.0)))
        outcome = serve(load)
        seconds = range(20, 20 + int(SECONDS - TIMEOUT_S))
        shares = [share_good(outcome.between(second, second + 1)) for second in seconds]
        served_s = next(second for second, share in enumerate(shares) if share >= 0.95)
        figures[f"overload.simulated.{name}_s"] = Figure(
            served_s, "s", "until 95 % of the calls are served again"
        )
    return figures


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    figures: dict[str, Figure] = {}
    for name, case in CASES.items():
        figures |= measure_case(name, case)
    report(figures | measure_fairness() | measure_recovery(), arguments.json)


if __name__ == "__main__":
    main()
