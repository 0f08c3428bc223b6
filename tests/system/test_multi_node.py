"""A replica over two Ray nodes: tensor parallelism between nodes, tcp with keys, detached from its launcher.

The nodes share this machine's network, or (slow) the second one has its own network and process ids, like another
host: then the ranks communicate by packets only.
"""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
from caller import Caller
from deadlines import READY_TIMEOUT_S
from fakes import submit
from far_network import FarNetwork, NetworkNotPermitted, open_network, run
from ray_nodes import LOOPBACK, RayNodes
from reference import Reference
from server_processes import processes_with

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.ray.launch_target import FleetLaunchTarget
from quire.cluster.fleet.ray.local_cluster import attach
from quire.cluster.fleet.replica.launch import launch_replica
from quire.cluster.fleet.replica.launch_progress import LaunchProgress, LaunchStage
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.fleet.replica.replica import Replica, adopt_replica, known_replicas
from quire.proto.config import EngineConfig
from quire.proto.errors import RankFailed, ReplicaUnavailable
from quire.proto.replica_status import ReplicaStatus
from quire.proto.stream import Drain, FinishReason, StatusQuery, TokenBatch
from quire.proto.transport.network import CurveKeys

pytestmark = pytest.mark.cluster

NAMESPACE = "multi-node"
PROMPTS = [[5, 6, 7, 8, 9], [11] * 20, list(range(40, 75))]
NEW_TOKENS = 12
# Tokens of a request that goes on long after a test has interfered.
LONG = 4000


@dataclass
class TwoNodes:
    """The cluster of this module's tests.

    Attributes:
        far: the second node.
        link: this end of its network; None if it is in this machine's own.
    """

    nodes: RayNodes
    far: subprocess.Popen[bytes]
    link: str | None


@contextmanager
def open_cluster(network: str) -> Iterator[TwoNodes]:
    """Start a head with room for a scheduler and a rank, and a node with room for a rank."""
    with ExitStack() as stack:
        far_network, inside = open_host(stack) if network == "two networks" else (None, [])
        near_ip, far_ip = (far_network.near_ip, far_network.far_ip) if far_network else (LOOPBACK, LOOPBACK)
        nodes = stack.enter_context(RayNodes({"CPU": 2, "slot": 1}, near_ip))
        far = nodes.add({"CPU": 1, "slot": 1}, far_ip, inside)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            patch.setenv(name, nodes.environment[name])
        with attach(nodes.address, NAMESPACE):
            wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "the second node to join")
        yield TwoNodes(nodes, far, far_network.link if far_network else None)


@pytest.fixture(scope="module", params=["one network", pytest.param("two networks", marks=pytest.mark.slow)])
def two_nodes(request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    with open_cluster(request.param) as cluster:
        yield cluster


def open_host(stack: ExitStack) -> tuple[FarNetwork, list[str]]:
    """Create a network, and return it with a prefix of commands that run there, with process ids of their own.

    Skips the test if this user may not.
    """
    try:
        network = open_network(stack)
        inside = [*network.inside, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        run(*inside, "true")
    except NetworkNotPermitted as error:
        pytest.skip(str(error))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user may not make a process namespace: {error.stderr.strip()}")
    return network, inside


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} took too long"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def target() -> FleetLaunchTarget:
    """Return a target that needs one slot per rank; each node has one, so the ranks are on different nodes."""
    return FleetLaunchTarget(CurveKeys.generate(), NAMESPACE, {"slot": 1.0}, placement_timeout_s=60.0)


@pytest.fixture(scope="module")
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def config(model_dir: Path) -> EngineConfig:
    options = EngineOptions(
        str(model_dir),
        tensor_parallel_size=2,
        device="cpu",
        dtype="float32",
        num_kv_blocks=520,
        step_timeout_s=30.0,
    )
    return resolve(options, Machine.this())


@pytest.fixture(scope="module")
def launched(two_nodes: TwoNodes) -> list[ReplicaRecord]:
    """Return the records of running replicas, one at most: the cluster has room for one."""
    return []


@pytest.fixture
def record(
    two_nodes: TwoNodes, target: FleetLaunchTarget, config: EngineConfig, launched: list[ReplicaRecord]
) -> ReplicaRecord:
    """Launch a replica, unless an earlier test has left one, and disconnect from the cluster."""
    if not launched:
        with attach(two_nodes.nodes.address, NAMESPACE):
            record = launch_replica(config, f"replica-{secrets.token_hex(3)}", target, version="v1").record
        launched.append(ReplicaRecord.from_json(record.to_json()))
    return launched[0]


@pytest.fixture
def replica(two_nodes: TwoNodes, record: ReplicaRecord) -> Iterator[Replica]:
    """Adopt the replica. It is not closed here."""
    with attach(two_nodes.nodes.address, NAMESPACE):
        yield adopt_replica(record)


def test_outputs_over_two_nodes_equal_transformers(
    record: ReplicaRecord, target: FleetLaunchTarget, model_dir: Path
) -> None:
    """No process is connected to Ray meanwhile: serving does not need the launcher."""
    assert record.node_ids[1] != record.node_ids[2]
    assert record.endpoint.startswith("tcp://")
    with Caller(record.endpoint, target.keys) as caller:
        for handle, prompt in enumerate(PROMPTS):
            caller.send(submit(handle, prompt, max_tokens=NEW_TOKENS, ignore_eos=True))
        outputs = caller.follow(*range(len(PROMPTS)))
    reference = Reference(model_dir)
    for handle, prompt in enumerate(PROMPTS):
        assert len(outputs[handle].token_ids) == NEW_TOKENS
        reference.check_greedy(prompt, outputs[handle].token_ids)


def test_client_without_the_keys_is_refused(record: ReplicaRecord, target: FleetLaunchTarget) -> None:
    """Knowing the fleet's public key is not enough."""
    stranger = CurveKeys.generate()
    with Caller(record.endpoint, replace(stranger, public=target.keys.public)) as caller:
        caller.send(StatusQuery(1))
        assert caller.receive(2.0) is None
    with Caller(record.endpoint, target.keys) as caller:
        caller.send(StatusQuery(2))
        status = caller.receive(60.0)
    assert isinstance(status, ReplicaStatus)
    assert (status.query_id, status.replica_id) == (2, record.replica_id)


def test_launch_without_room_explains_the_shortage(
    two_nodes: TwoNodes, target: FleetLaunchTarget, config: EngineConfig
) -> None:
    four = replace(config, parallel=replace(config.parallel, tensor_parallel_size=4))
    hasty = replace(target, placement_timeout_s=1.0)
    with attach(two_nodes.nodes.address, NAMESPACE):
        with pytest.raises(
            ReplicaUnavailable, match=r"no room in 1 s: replica needs 5 CPU, 4 slot over"
        ) as no:
            launch_replica(four, "replica-big", hasty)
        assert "the whole cluster, fully grown, has 3 CPU, 2 slot" in str(no.value)
        assert "replica-big" not in known_replicas(NAMESPACE)


def test_launch_canceled_by_its_callback_leaves_nothing(
    two_nodes: TwoNodes, target: FleetLaunchTarget, config: EngineConfig
) -> None:
    stages: list[LaunchStage] = []

    def refuse(progress: LaunchProgress) -> None:
        stages.append(progress.stage)
        assert "replica-canceled" in known_replicas(NAMESPACE)  # `remove_replica` can find it
        raise ReplicaUnavailable("the launch was canceled")

    with attach(two_nodes.nodes.address, NAMESPACE):
        with pytest.raises(ReplicaUnavailable, match="the launch was canceled"):
            launch_replica(config, "replica-canceled", target, on_progress=refuse)
        assert stages == [LaunchStage.PLACING]
        assert "replica-canceled" not in known_replicas(NAMESPACE)


def test_draining_replica_moves_requests_and_its_killed_far_rank_is_replaced(
    two_nodes: TwoNodes, replica: Replica, target: FleetLaunchTarget, launched: list[ReplicaRecord]
) -> None:
    """Closing it then leaves nothing."""
    launched.clear()  # later tests launch another one
    assert known_replicas(NAMESPACE) == {replica.replica_id}
    with Caller(replica.address, target.keys) as caller:
        caller.send(submit(1, [5, 6, 7], max_tokens=8000, ignore_eos=True))
        assert isinstance(caller.receive(60.0), TokenBatch)
        caller.send(Drain(grace_s=120.0))
        assert status_of(caller).draining
        caller.send(submit(2, [5, 6, 7]))
        moved = caller.follow(2)[2].finish
        assert moved is not None
        assert moved.reason is FinishReason.MOVED
        kill_worker(two_nodes.far)
        output = caller.follow(1)[1]
        assert output.finish is not None
        assert output.finish.reason is FinishReason.MOVED  # it does not wait for the new rank
        deadline = time.monotonic() + 120.0
        while status_of(caller).num_recoveries == 0:
            assert time.monotonic() < deadline, "the rank was not replaced"
    replica.close()
    assert known_replicas(NAMESPACE) == set()
    with pytest.raises(ReplicaUnavailable, match=r"the scheduler of .* is not running"):
        adopt_replica(replica.record)


def status_of(caller: Caller) -> ReplicaStatus:
    caller.send(StatusQuery(1))
    while not isinstance(message := caller.receive(60.0), ReplicaStatus):
        assert message is not None
    return message


def far_rank_of(record: ReplicaRecord, two_nodes: TwoNodes) -> int:
    here = ray.get_runtime_context().get_node_id()
    (rank,) = [rank for rank, node_id in enumerate(record.node_ids[1:]) if node_id != here]
    return rank


def kill_worker(node: subprocess.Popen[bytes]) -> None:
    """Kill the rank on a node, found from outside: its process id may differ inside the node."""
    (worker,) = processes_with("WorkerActor", node.pid)
    worker.kill()


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node, as the loss of its machine does."""
    for process in (*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)):
        process.kill()


@pytest.mark.slow
def test_lost_node_of_two_stages_is_replaced_by_another(target: FleetLaunchTarget, model_dir: Path) -> None:
    """The request goes on, and no token differs."""
    options = EngineOptions(
        str(model_dir), pipeline_parallel_size=2, device="cpu", dtype="float32", num_kv_blocks=520
    )
    with open_cluster("one network") as two_nodes, attach(two_nodes.nodes.address, NAMESPACE):
        replica = launch_replica(resolve(options, Machine.this()), "replica-lost-node", target)
        _, first_stage, second_stage = replica.record.node_ids
        assert first_stage != second_stage
        two_nodes.nodes.add({"CPU": 1, "slot": 1}, LOOPBACK, [])
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, "the third node to join")
        with Caller(replica.address, target.keys) as caller:
            caller.send(submit(1, PROMPTS[0], max_tokens=LONG, ignore_eos=True))
            first = caller.receive(60.0)
            assert isinstance(first, TokenBatch)
            kill_node(two_nodes.far)
            output = caller.follow(1, timeout_s=300.0)[1]
            assert status_of(caller).num_recoveries >= 1
        assert output.finish is not None
        assert output.finish.reason is FinishReason.LENGTH, output.finish.error
        token_ids = [*first.token_ids.tolist(), *output.token_ids]
        assert len(token_ids) == LONG
        Reference(model_dir).check_greedy(PROMPTS[0], token_ids)
        replica.close()


@pytest.mark.slow
def test_rank_on_a_vanished_host_is_named(target: FleetLaunchTarget, config: EngineConfig) -> None:
    """No packet reports the end of the host; the deadline of the step detects it."""
    hasty = replace(config, scheduler=replace(config.scheduler, step_timeout_s=5.0))
    with open_cluster("two networks") as two_nodes, attach(two_nodes.nodes.address, NAMESPACE):
        replica = launch_replica(hasty, "replica-cut-off", target)
        with Caller(replica.address, target.keys) as caller:
            caller.send(submit(1, [5, 6, 7], max_tokens=8000, ignore_eos=True))
            assert isinstance(caller.receive(60.0), TokenBatch)
            assert two_nodes.link is not None
            run("ip", "link", "set", two_nodes.link, "down")
            output = caller.follow(1, timeout_s=180.0)[1]
        assert output.finish is not None
        assert f"rank {far_rank_of(replica.record, two_nodes)} failed" in output.finish.error
        assert isinstance(replica.failure.result(60), RankFailed)
        replica.close()
