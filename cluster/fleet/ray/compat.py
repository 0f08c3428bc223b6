"""Ray's private names: every use of them is in this module.

Ray may change these names in any release. `tests/cluster/fleet/ray` runs each function below with every supported
minor version of Ray, and checks that no other module uses a private name.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray._private import worker as ray_worker
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import state as cluster_state
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.core.generated.common_pb2 import WorkerType
from ray.experimental import internal_kv

# Longer than any node lives.
KEEP_IDLE_PROCESSES_S = 10 * 365 * 86_400

# Every head node has one unit of this resource.
HEAD_NODE_RESOURCE = "node:__internal_head__"

# Ray's command line; Ray promises to keep none of the functions behind it.
RAY_COMMAND = (sys.executable, "-m", "ray.scripts.scripts")


@dataclass(frozen=True, slots=True)
class AutoscalerStatus:
    """Nodes that the autoscaler is adding, and those that it failed to add.

    Attributes:
        num_pending: node type |-> nodes being started.
        failures: (node type, reason) of each node type or launch that failed.
    """

    num_pending: Mapping[str, int] = field(default_factory=dict)
    failures: Sequence[tuple[str, str]] = ()


class _ShieldedPopen(services.ConsolePopen):  # type: ignore[misc]
    """Starts a process of Ray that no signal to this process's group, nor SIGTERM at all, ends.

    `timeout` and a terminal signal the whole process group, and systemd every process of the unit. If Ray's processes
    ended first, this process would wait 60 s for them. The signal mask is inherited by all processes of the instance.

    Nothing waits for these processes before the instance ends, so the pid of a raylet that died stays in use. Ray's
    other processes look for it every second, and would end without it.
    """

    def __init__(self, *arguments: Any, preexec_fn: Callable[[], None], **options: Any) -> None:
        def before_exec() -> None:
            preexec_fn()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        super().__init__(*arguments, preexec_fn=before_exec, start_new_session=True, **options)

    def terminate(self) -> None:
        self.kill()


def start_local(temp_dir: Path, **options: Any) -> None:
    """Start a Ray instance on this machine whose files are in `temp_dir`; see `ray.init` for the options.

    Its processes listen on loopback alone. They are in sessions of their own and ignore SIGTERM: only this process
    ends them.
    """
    with _shielded_processes(), _on_loopback():
        ray.init(address="local", _temp_dir=str(temp_dir), **options)


@contextmanager
def _shielded_processes() -> Iterator[None]:
    popen, services.ConsolePopen = services.ConsolePopen, _ShieldedPopen
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Give the node the address 127.0.0.1, where Ray listens alone. Ray would replace it by that of an interface."""
    functions = (
        (services, "get_node_ip_address"),
        (services, "resolve_ip_for_localhost"),
        (ray.util, "get_node_ip_address"),
    )
    before = [getattr(module, name) for module, name in functions]
    for module, name in functions:
        setattr(module, name, lambda *_, **__: "127.0.0.1")
    try:
        yield
    finally:
        for (module, name), function in zip(functions, before, strict=True):
            setattr(module, name, function)


def reload_environment() -> None:
    """Make Ray read its RAY_* environment variables again, which it does by itself only when it is imported."""
    Config.initialize("")


def mute_process_messages() -> None:
    """Keep Ray from printing its own report of each process that dies to this process's stdout."""
    ray_worker.print_to_stdstream = lambda *_, **__: None


def kv_keys(namespace: bytes) -> list[bytes]:
    """Return every key of a namespace of Ray's key-value store."""
    return list(internal_kv._internal_kv_list(b"", namespace=namespace))


def kv_get(key: bytes, namespace: bytes | None = None) -> bytes | None:
    """Return the value of a key; None if there is none."""
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=namespace)
    return value


def kv_put(key: bytes, value: bytes, namespace: bytes | None) -> None:
    """Set the value of a key."""
    internal_kv._internal_kv_put(key, value, namespace=namespace)


def kv_delete(key: bytes, namespace: bytes | None) -> None:
    """Delete a key, if it is there."""
    internal_kv._internal_kv_del(key, namespace=namespace)


def free_resources() -> dict[str, dict[str, float]]:
    """Return node id |-> resource |-> amount that is free now."""
    free: dict[str, dict[str, float]] = cluster_state.available_resources_per_node()
    return free


def num_idle_processes(address: str, timeout_s: float) -> int:
    """Return the number of processes of a node that execute nothing and are no actor.

    Args:
        address: ``HOST:PORT`` of the node's manager, the raylet.

    Raises:
        grpc.RpcError: the raylet did not answer in time.
    """
    request = node_manager_pb2.GetNodeStatsRequest(include_memory_info=False)
    with _node_manager(address) as stub:
        processes = stub.GetNodeStats(request, timeout=timeout_s).core_workers_stats
    no_actor = (b"", ray.ActorID.nil().binary())
    return sum(
        each.worker_type == WorkerType.WORKER and each.actor_id in no_actor and not each.num_running_tasks
        for each in processes
    )


def start_idle_processes(address: str, count: int, timeout_s: float) -> None:
    """Have a node start processes that later actors find ready; returns before they are.

    Ray ends no such process because it is idle.

    Args:
        address: see `num_idle_processes`.

    Raises:
        grpc.RpcError: the raylet did not answer in time.
    """
    request = node_manager_pb2.PrestartWorkersRequest(
        num_workers=count, keep_alive_duration_secs=KEEP_IDLE_PROCESSES_S
    )
    with _node_manager(address) as stub:
        stub.PrestartWorkers(request, timeout=timeout_s)


@contextmanager
def _node_manager(address: str) -> Iterator[Any]:
    with init_grpc_channel(address) as channel:
        yield node_manager_pb2_grpc.NodeManagerServiceStub(channel)


def draining_nodes() -> dict[str, int]:
    """Return node id |-> deadline of the drain, in ms since the epoch; 0 for a drain without deadline."""
    draining: dict[str, int] = cluster_state.get_draining_nodes()
    return draining


def drain_node(node_id: str, message: str) -> str:
    """Ask Ray to place nothing more on a node, as before a preemption, without a deadline.

    Returns:
        why Ray refuses; empty if it accepts.
    """
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, problem = gcs.drain_node(node_id, reason, message, 0)
    return "" if is_accepted else str(problem) or "no reason given"


def autoscaler_status() -> AutoscalerStatus:
    """Return the status of the cluster's autoscaler; an empty one if the cluster has none.

    Version 1 of the autoscaler leaves a JSON report in the key-value store; version 2 answers a call.

    Raises:
        Exception: of any kind, if Ray's answer has another form than expected.
    """
    report = kv_get(DEBUG_AUTOSCALING_STATUS.encode())
    if report:
        return parse_autoscaler_report(json.loads(report).get("autoscaler_report") or {})
    return parse_cluster_status(get_cluster_status(ray.get_runtime_context().gcs_address))


def parse_autoscaler_report(report: Mapping[str, Any]) -> AutoscalerStatus:
    """Return the status in a report of version 1 of the autoscaler."""
    pending = Counter[str](report.get("pending_launches") or {})
    pending.update(node_type for _, node_type, _ in report.get("pending_nodes") or ())
    availabilities = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    problems = {
        node_type: availability.get("unavailable_node_information")
        for node_type, availability in availabilities.items()
    }
    failures = [
        (node_type, f"{problem.get('category')}: {problem.get('description')}")
        for node_type, problem in problems.items()
        if problem
    ]
    return AutoscalerStatus(+pending, failures)


def parse_cluster_status(status: ClusterStatus) -> AutoscalerStatus:
    """Return the status in an answer of version 2 of the autoscaler."""
    pending = Counter[str]()
    for launch in status.pending_launches:
        pending[launch.ray_node_type_name] += launch.count
    pending.update(node.ray_node_type_name for node in status.pending_nodes)
    failures = [(launch.ray_node_type_name, str(launch.details)) for launch in status.failed_launches]
    return AutoscalerStatus(+pending, failures)


def complete_cluster_file(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file for `ray up` with Ray's defaults filled in and checked.

    Raises:
        jsonschema.ValidationError: a setting breaks Ray's schema.
        Exception: of any other kind, for other faults.
    """
    completed: dict[str, Any] = prepare_config(config)
    validate_config(completed)
    return completed
