"""Equal decode steps that are planned and applied at once: no figure of a run changes, and the state stays sound."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace

import pytest

from benchmarks.replay import NO_LIMIT, ReplicaModel, roofline
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.simulation.fleet import Policy, SimulatedFleet, SimulatedRequest, Watcher, autoscaling
from quire.cluster.simulation.run import Summary
from quire.cluster.simulation.step_time import Coefficients
from quire.cluster.simulation.traces import TracedRequest
from quire.proto.config import EngineConfig


@dataclass(slots=True)
class Recorder(Watcher):
    """Keeps every time of a run."""

    requests: list[SimulatedRequest] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def on_gap(self, seconds: float, count: int = 1) -> None:
        self.gaps += [seconds] * count

    def on_end(self, request: SimulatedRequest) -> None:
        self.requests.append(request)


def make_requests(count: int, gap_s: float, *, shares: bool = False) -> list[TracedRequest]:
    rng, at = random.Random(5), 0.0
    requests = []
    for number in range(count):
        at += rng.expovariate(1 / gap_s)
        num_prompt, num_output = rng.randrange(1, 700), rng.randrange(1, 300)
        topic = 1000 * rng.randrange(3)
        blocks = tuple(range(topic, topic + num_prompt // 16)) if shares else ()
        requests.append(TracedRequest(number, at, num_prompt, num_output, blocks))
    return requests


def run(
    model: ReplicaModel,
    requests: list[TracedRequest],
    *,
    joins_steps: bool,
    num_replicas: int = 1,
    policy: Policy | None = None,
    steps_in_flight: int = 2,
) -> dict[str, object]:
    """Return everything that a run shows."""
    config = audited(model.config(), steps_in_flight)
    recorder = Recorder()
    fleet = SimulatedFleet(
        config, model.step_time, recorder, num_replicas=num_replicas, policy=policy, cold_start_s=5.0,
        joins_steps=joins_steps,
    )  # fmt: skip
    schedulers = [replica.scheduler for replica in fleet.replicas.values()]
    cost = fleet.run(requests)
    recorder.requests.sort(key=lambda each: each.traced.number)
    return {
        "requests": [asdict(each) for each in recorder.requests],
        "gaps": sorted(recorder.gaps),
        "cost": asdict(cost),
        "schedulers": [
            (asdict(each.stats), asdict(each.throughput), each.prefill_tokens_per_s, each.prefill_delay)
            for each in schedulers
        ],
    }


def audited(config: EngineConfig, steps_in_flight: int) -> EngineConfig:
    """Return a configuration with which each step that is run by itself recounts blocks, rows and queues."""
    scheduler = replace(config.scheduler, audit=True, max_steps_in_flight=steps_in_flight)
    return replace(config, scheduler=scheduler)


# Each kind of work takes time, the release of a row as well.
TIMED = replace(roofline(), coefficients=Coefficients(1e-3, 1e-5, 5e-4, 1e-4, 2e-4))
MODELS = {
    "plain": (ReplicaModel(prefix_caching=False), 25, 0.05, False),
    "prefixes": (ReplicaModel(num_blocks=200), 25, 0.05, True),
    "scarce blocks": (ReplicaModel(num_blocks=150, prefix_caching=False), 25, 0.02, False),
    "scarce rows": (ReplicaModel(max_num_seqs=4), 20, 0.02, True),
    "idle": (ReplicaModel(), 5, 3.0, True),
    "timed": (ReplicaModel(step_time=TIMED, num_blocks=250, prefix_caching=False), 25, 0.05, False),
}


class TestEqualSteps:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("steps_in_flight", [1, 2])
    def test_one_replica_gives_equal_times(self, name: str, steps_in_flight: int) -> None:
        model, count, gap_s, shares = MODELS[name]
        model = replace(model, max_queue_len=NO_LIMIT, max_model_len=1024)
        requests = make_requests(count, gap_s, shares=shares)
        joined = run(model, requests, joins_steps=True, steps_in_flight=steps_in_flight)
        assert joined == run(model, requests, joins_steps=False, steps_in_flight=steps_in_flight)

    @pytest.mark.parametrize("shares", [True, False])
    def test_fleet_with_autoscaling_gives_equal_times(self, shares: bool) -> None:
        model = ReplicaModel(num_blocks=300, max_num_seqs=8, max_queue_len=NO_LIMIT, max_model_len=1024)
        requests = make_requests(70, 0.08, shares=shares)
        limits = ScalingLimits(
            min_replicas=1, max_replicas=5, target_wait_s=1.0, down_delay_s=3.0, cooldown_s=1.0
        )
        joined, single = (
            run(model, requests, joins_steps=joins, num_replicas=3, policy=autoscaling(limits))
            for joins in (True, False)
        )
        assert joined == single

    def test_summary_does_not_depend_on_it(self) -> None:
        model = ReplicaModel(max_queue_len=NO_LIMIT, max_model_len=1024)
        summaries = []
        for joins in (True, False):
            summary = Summary()
            fleet = SimulatedFleet(
                model.config(), model.step_time, summary, num_replicas=2, joins_steps=joins
            )
            fleet.run(make_requests(30, 0.05))
            summaries.append((summary.itl.summary(), summary.ttft.summary(), summary.num_output_tokens))
        (joined, *others), (single, *single_others) = summaries
        assert others == single_others
        assert joined.pop("mean") == pytest.approx(single.pop("mean"), rel=1e-12)
        assert joined == single

    def test_most_steps_are_run_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time of a simulation depends on it, which this test counts in turns instead."""
        model = ReplicaModel(max_queue_len=NO_LIMIT, max_model_len=1024)
        turns = 0
        on_turn = SimulatedFleet._turn

        def count_turn(fleet: SimulatedFleet, *arguments: object) -> None:
            nonlocal turns
            turns += 1
            on_turn(fleet, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(SimulatedFleet, "_turn", count_turn)
        fleet = SimulatedFleet(model.config(), model.step_time, Summary())
        cost = fleet.run(make_requests(10, 0.5))
        assert turns < cost.num_steps / 5
