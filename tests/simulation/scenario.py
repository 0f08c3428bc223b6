"""One run of the simulation: a fleet, its clients, its faults, and the invariants that must hold."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fakes import EOS, VOCAB_SIZE

from quire.cluster.fleet.controller.fleet_state import ReplicaState
from quire.cluster.simulation.replica import SimulatedClock
from quire.proto.errors import QuireError

from .event_loop import run_simulated
from .network import EventLog, Network
from .processes import ControllerProcess, Gateway, deployment, without_models
from .replicas import Cluster, KvLinks, SimulatedReplica
from .workload import Job, make_job, run_job

NUM_GATEWAYS = 2
ARRIVALS_S = 6.0
# After the last fault everything must be in order again by then.
SETTLED_S = 400.0
CHECK_INTERVAL_S = 0.5
# A gateway must not send requests to a replica that has been dead or out of reach for this long: the silence timeout
# of its client, and two heartbeats.
MAX_FALSE_READINESS_S = 15.0 + 5.0
# A request is given up after this many failures under it.
MAX_FATAL_FAULTS = 2
# With a deadline: it passed, or no replica was ready in time.
ENDS_BY_DEADLINE = "DeadlineExpired", "Overloaded", "ReplicaUnavailable", "RankFailed"


@dataclass(slots=True)
class Outcome:
    """Result of a run.

    Attributes:
        faults: kind |-> how many.
        outcomes: of requests |-> how many.
        reads: of blocks that moved: ``ordered``, ``read``, or why they were not read |-> how many; ``warmed`` |->
            tokens that new replicas were told to read.
        digest: of the run's events; equal for equal runs.
    """

    faults: Counter[str]
    outcomes: Counter[str]
    reads: Counter[str]
    num_messages: int
    seconds: float
    digest: str


@dataclass
class World:
    """A fleet and everything that happens to it."""

    clock: SimulatedClock
    rng: random.Random
    cluster: Cluster
    controller: ControllerProcess
    gateways: list[Gateway] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    num_fatal: int = 0
    num_gateways_made: int = 0
    version: int = 1
    num_replicas: int = 2
    unreachable_since: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def running(self) -> list[SimulatedReplica]:
        return [each for each in self.cluster.live.values() if each.ended_at is None]

    def start_gateway(self) -> None:
        self.num_gateways_made += 1
        self.gateways.append(Gateway(self.cluster, f"gateway-{self.num_gateways_made}", self.controller))

    def a_replica(self) -> SimulatedReplica | None:
        return self.rng.choice(self.running) if self.running else None

    async def later(self, seconds: float, action: Callable[[], object]) -> None:
        await asyncio.sleep(seconds)
        action()


# Faults: each returns whether it could happen.


async def kill_replica(world: World) -> bool:
    return _fatal(world, SimulatedReplica.kill)


async def fail_rank(world: World) -> bool:
    return _fatal(world, SimulatedReplica.fail_rank)


def _fatal(world: World, harm: Callable[[SimulatedReplica], None]) -> bool:
    replica = world.a_replica()
    if replica is None or world.num_fatal >= MAX_FATAL_FAULTS:
        return False
    world.num_fatal += 1
    harm(replica)
    return True


async def stop_replica(world: World) -> bool:
    """Stop a replica's process; it continues, maybe after it was given up."""
    replica = world.a_replica()
    if replica is None or replica.stopped_at is not None:
        return False
    seconds = world.rng.choice((0.5, 4.0, 30.0))
    if seconds > MAX_FALSE_READINESS_S / 2:
        if world.num_fatal >= MAX_FATAL_FAULTS:
            return False
        world.num_fatal += 1
    replica.stop_for(seconds)
    return True


async def partition(world: World) -> bool:
    """Cut a gateway off a replica or the controller, or the controller off a replica."""
    replica = world.a_replica()
    gateway = world.rng.choice(world.gateways).name
    pairs = [(gateway, "controller")]
    if replica is not None:
        pairs += [(gateway, replica.record.replica_id), ("controller", replica.record.replica_id)]
    one, other = world.rng.choice(pairs)
    seconds = world.rng.choice((0.3, 3.0, 25.0))
    if "controller" not in (one, other) and seconds > 10:
        if world.num_fatal >= MAX_FATAL_FAULTS:
            return False
        world.num_fatal += 1
    world.cluster.network.partition(one, other)
    asyncio.get_running_loop().call_later(seconds, world.cluster.network.heal, one, other)
    return True


async def break_connection(world: World) -> bool:
    """Break a connection: what is on its way is lost."""
    replica = world.a_replica()
    if replica is None or world.num_fatal >= MAX_FATAL_FAULTS:
        return False
    world.num_fatal += 1
    world.cluster.network.reset(replica.record.replica_id, world.rng)
    return True


async def slow_network(world: World) -> bool:
    names = [*(gateway.name for gateway in world.gateways), "controller"]
    names += [replica.record.replica_id for replica in world.running]
    name = world.rng.choice(names)
    world.cluster.network.slow_down(name, world.rng.choice((0.05, 0.5, 2.0)))
    asyncio.get_running_loop().call_later(
        world.rng.uniform(0.5, 5.0), world.cluster.network.slow_down, name, 0.0
    )
    return True


async def crash_controller(world: World) -> bool:
    if world.controller.fleet is None:
        return False
    await world.controller.crash()
    await asyncio.sleep(world.rng.uniform(0.0, 4.0))
    await _retry(world.controller.start)
    return True


async def crash_gateway(world: World) -> bool:
    gateway = world.gateways.pop(world.rng.randrange(len(world.gateways)))
    world.start_gateway()
    await gateway.crash()
    return True


async def drain(world: World) -> bool:
    replica = world.a_replica()
    if replica is None or world.controller.fleet is None:
        return False
    try:
        await world.controller.fleet.drain(replica.record.replica_id)
    except (QuireError, ConnectionError):
        return False
    return True


async def new_version(world: World) -> bool:
    return await _deploy(world, world.version + 1, world.num_replicas)


async def scale(world: World) -> bool:
    return await _deploy(world, world.version, world.rng.randrange(1, 4))


async def _deploy(world: World, version: int, num_replicas: int) -> bool:
    if world.controller.fleet is None:
        return False
    world.version, world.num_replicas = version, num_replicas
    await world.controller.fleet.deploy(deployment(version, num_replicas))
    return True


async def fail_launches(world: World) -> bool:
    world.cluster.num_failing_launches += world.rng.randrange(1, 3)
    return True


async def fail_calls(world: World) -> bool:
    """Let the next calls to the cluster fail, as while the Ray head is away."""
    world.cluster.num_failing_calls += world.rng.randrange(1, 4)
    return True


async def stall_reads(world: World) -> bool:
    """Let no read of a replica's blocks, nor any of its own, end for a time."""
    replica = world.a_replica()
    if replica is None:
        return False
    world.cluster.kv.stalled.add(name := replica.record.replica_id)
    asyncio.get_running_loop().call_later(
        world.rng.choice((1.0, 10.0, 40.0)), world.cluster.kv.stalled.discard, name
    )
    return True


async def cut_ranks_apart(world: World) -> bool:
    """Cut the ranks of two replicas apart: neither reads the other's blocks."""
    if len(world.running) < 2:
        return False
    one, other = (replica.record.replica_id for replica in world.rng.sample(world.running, 2))
    world.cluster.network.partition(one, other)
    seconds = world.rng.choice((1.0, 10.0, 40.0))
    asyncio.get_running_loop().call_later(seconds, world.cluster.network.heal, one, other)
    return True


async def tear_reads(world: World) -> bool:
    """Let reads take blocks while their owner writes to them, for a time."""
    links = world.cluster.kv.peers
    links.tears = True
    asyncio.get_running_loop().call_later(world.rng.uniform(1.0, 10.0), setattr, links, "tears", False)
    return True


async def lose_reports(world: World) -> bool:
    """Lose what readers tell other replicas' ranks, for a time."""
    world.cluster.kv.loses_reports = True
    asyncio.get_running_loop().call_later(
        world.rng.uniform(1.0, 20.0), setattr, world.cluster.kv, "loses_reports", False
    )
    return True


FAULTS: tuple[tuple[Callable[[World], Awaitable[bool]], int], ...] = (
    (kill_replica, 3),
    (fail_rank, 3),
    (stop_replica, 3),
    (partition, 4),
    (break_connection, 2),
    (slow_network, 2),
    (crash_controller, 2),
    (crash_gateway, 2),
    (drain, 8),
    (new_version, 1),
    (scale, 2),
    (fail_launches, 1),
    (fail_calls, 1),
    (stall_reads, 2),
    (cut_ranks_apart, 1),
    (tear_reads, 2),
    (lose_reports, 1),
)


async def _retry(action: Callable[[], Awaitable[None]]) -> None:
    """Repeat a start until it succeeds, as Ray restarts a process that failed."""
    for _ in range(20):
        try:
            await action()
            return
        except (QuireError, ConnectionError):
            await asyncio.sleep(0.5)
    raise AssertionError("a process did not start 20 times")


async def simulate(clock: SimulatedClock, rng: random.Random, log: EventLog) -> Outcome:
    """Run one scenario and check it. Raises AssertionError at a violated invariant."""
    network = Network(rng, log)
    cluster = Cluster(network, KvLinks(network, rng), rng, live={}, departing={}, texts={})
    world = World(clock, rng, cluster, ControllerProcess(cluster))
    await world.controller.start()
    assert world.controller.fleet is not None
    await world.controller.fleet.deploy(deployment(1, world.num_replicas))
    for _ in range(NUM_GATEWAYS):
        world.start_gateway()
    async with asyncio.timeout(SETTLED_S):
        await _until_settled(world)
    shared = [rng.randrange(EOS + 1, VOCAB_SIZE) for _ in range(8)]
    world.jobs = [make_job(number, rng, shared) for number in range(rng.randrange(4, 16))]
    checking = asyncio.ensure_future(_check_health(world))
    faults = asyncio.ensure_future(_make_faults(world))
    runs = [asyncio.ensure_future(_run_later(world, job)) for job in world.jobs]
    try:
        async with asyncio.timeout(SETTLED_S):
            await faults
            await _all_or_first_failure([*runs, checking], until=len(runs))
            await _until_settled(world)
    except TimeoutError:
        raise AssertionError(_stuck(world)) from None
    finally:
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
    _check_outcomes(world)
    reads = cluster.kv.num_read + Counter(warmed=sum(each.pool.num_warmed_tokens for each in world.gateways))
    await _close(world)
    outcomes = Counter(job.outcome for job in world.jobs)
    return Outcome(world.faults, outcomes, reads, network.num_messages, clock.now, log.digest)


async def _all_or_first_failure(tasks: list[asyncio.Future[None]], until: int) -> None:
    """Wait for the first `until` tasks; raise as soon as any task fails."""
    pending = set(tasks)
    while any(not task.done() for task in tasks[:until]):
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()


async def _run_later(world: World, job: Job) -> None:
    await asyncio.sleep(world.rng.uniform(0.0, ARRIVALS_S))
    await run_job(job, world.gateways, world.rng)
    world.cluster.network.log.add(world.clock.now, f"job {job.number} {job.outcome} {job.received}")


async def _make_faults(world: World) -> None:
    kinds, weights = zip(*FAULTS, strict=True)
    for _ in range(world.rng.randrange(1, 9)):
        await asyncio.sleep(world.rng.expovariate(1.0))
        (kind,) = world.rng.choices(kinds, weights)
        if await kind(world):
            world.faults[kind.__name__] += 1
            world.cluster.network.log.add(world.clock.now, kind.__name__)


async def _check_health(world: World) -> None:
    """No gateway sends requests to a replica that has been dead, stopped or out of reach for long."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        for gateway in world.gateways:
            try:
                pool = gateway.pool
            except QuireError:
                continue
            for replica_id in pool.clients:
                silent_for_s = _silent_for_s(world, gateway.name, replica_id)
                is_ready = not pool.why_unavailable(replica_id)
                assert not (is_ready and silent_for_s > MAX_FALSE_READINESS_S), (
                    f"{gateway.name} sends requests to {replica_id}, which has been silent for {silent_for_s:.1f} s"
                )


def _silent_for_s(world: World, gateway: str, replica_id: str) -> float:
    """Return the time for which a replica cannot have answered a gateway."""
    replica = world.cluster.live.get(replica_id)
    is_silent = (
        replica is None
        or replica.ended_at is not None
        or replica.stopped_at is not None
        or world.cluster.network.are_apart(gateway, replica_id)
    )
    key = gateway, replica_id
    if not is_silent:
        world.unreachable_since.pop(key, None)
        return 0.0
    return world.clock.now - world.unreachable_since.setdefault(key, world.clock.now)


async def _until_settled(world: World) -> None:
    """Wait until the fleet is as deployed, and every gateway and replica is idle and ready."""
    while _unsettled(world) is not None:
        await asyncio.sleep(0.5)


def _unsettled(world: World) -> str | None:
    """Return what is not in order yet; None if everything is."""
    fleet = world.controller.fleet
    if fleet is None:
        return "the controller is down"
    entries = [entry for entry in fleet.state().replicas if entry.state is ReplicaState.READY]
    others = [
        entry
        for entry in fleet.state().replicas
        if entry.state in (ReplicaState.STARTING, ReplicaState.DRAINING)
    ]
    running = {replica.record.replica_id for replica in world.running}
    if others or len(entries) != world.num_replicas or {entry.replica_id for entry in entries} != running:
        return f"the fleet has {entries} and {others}, {running} run, {world.num_replicas} are wanted"
    expected = deployment(world.version, world.num_replicas).version
    if any(entry.version != expected for entry in entries):
        return f"{entries} are not of version {expected}"
    for gateway in world.gateways:
        try:
            pool = gateway.pool
        except QuireError as error:
            return str(error)
        ready = {name for name in pool.clients if not pool.why_unavailable(name)}
        if ready != running:
            return f"{gateway.name} is ready for {ready} of {running}"
        if pool.num_waiting:
            return f"{pool.num_waiting} requests wait at {gateway.name}"
        for client in pool.clients.values():
            if client.num_running:
                return f"{gateway.name} waits for {client.num_running} sequences of {client.replica_id}"
    for replica in world.running:
        scheduler = replica.scheduler
        if scheduler.has_work or scheduler.blocks.num_held_blocks or scheduler.blocks.num_fenced_blocks:
            return (
                f"{replica.record.replica_id} has {scheduler.num_running} running and {scheduler.num_waiting} "
                f"waiting sequences, and {scheduler.blocks.num_held_blocks} blocks"
            )
        if scheduler.kv_moves.num_kv_leases or replica.kv_peer.leases or replica.kv_peer.pulls:
            return f"{replica.record.replica_id} has {scheduler.kv_moves.num_kv_leases} leases, or open pulls"
    return None


def _check_outcomes(world: World) -> None:
    for job in world.jobs:
        is_excused = job.may_fail and job.outcome in ENDS_BY_DEADLINE
        assert job.outcome in ("complete", "aborted") or is_excused, (
            f"job {job.number} was lost: {job.outcome}: {job.error}"
        )
    for replica in world.running:
        replica.scheduler.check_integrity()
        assert replica.scheduler.num_running == replica.scheduler.num_waiting == 0


def _stuck(world: World) -> str:
    jobs = [
        f"job {job.number} after {job.num_attempts} attempts: {job.received}"
        for job in world.jobs
        if not job.outcome
    ]
    return f"not in order {SETTLED_S:g} s after the start: {_unsettled(world)}; {'; '.join(jobs)}"


async def _close(world: World) -> None:
    for gateway in world.gateways:
        await gateway.crash()
    await world.controller.crash()
    for replica in world.running:
        replica.close()


def run_seed(seed: int, write_event: Callable[[str], object] | None = None) -> Outcome:
    """Run the scenario of a seed; `write_event` gets the line of each event."""
    log = EventLog(write_event)
    with without_models():
        return run_simulated(lambda clock, rng: simulate(clock, rng, log), seed)
