"""Every function of `compat` works with the Ray that is installed.

test_ray_versions.py runs this file with each supported version of Ray.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import ray
from deadlines import PROGRAM_TIMEOUT_S
from ray._private import worker as ray_worker
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest, NodeInfo, Stats

from quire.cluster.fleet.ray import compat
from quire.cluster.fleet.ray.compat import AutoscalerStatus
from quire.cluster.fleet.ray.local_cluster import LocalCluster
from quire.cluster.os_utils.processes import children

NAMESPACE = b"compat-test"
DEADLINE_S = 240.0
REPORT = {
    "pending_launches": {"gpu-small": 2, "idle": 0},
    "pending_nodes": [["10.0.0.9", "gpu-small", "setting-up"]],
    "node_availability_summary": {
        "node_availabilities": {
            "gpu-small": {"unavailable_node_information": None},
            "gpu-big": {
                "unavailable_node_information": {"category": "InsufficientCapacity", "description": "no p5"}
            },
        }
    },
}
REPORTED = AutoscalerStatus({"gpu-small": 3}, [("gpu-big", "InsufficientCapacity: no p5")])


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[LocalCluster]]:
    """The cluster of this module's tests, once it is needed. `start_local` starts it."""
    opened: list[LocalCluster] = []
    yield opened
    while opened:
        opened.pop().close()


@pytest.fixture
def cluster(clusters: list[LocalCluster]) -> LocalCluster:
    """A cluster of one node."""
    if not clusters:
        clusters.append(LocalCluster(num_cpus=1))
    return clusters[0]


@pytest.fixture
def node_id(cluster: LocalCluster) -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.mark.cluster
def test_start_local_keeps_ray_s_files_in_the_given_directory(cluster: LocalCluster) -> None:
    assert (cluster.directory / "r" / "session_latest" / "logs").is_dir()


@pytest.mark.cluster
def test_processes_of_start_local_are_shielded_from_signals(cluster: LocalCluster) -> None:
    pids = children(os.getpid())
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
    ours = [pid for pid, name in names.items() if name in ("raylet", "gcs_server")]
    assert len(ours) == 2
    for pid in {*ours, *(grandchild for parent in ours for grandchild in children(parent))}:
        assert os.getsid(pid) != os.getsid(0)
        blocked = re.findall(r"^SigBlk:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        assert int(blocked[0], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.cluster
def test_processes_of_start_local_listen_on_loopback_alone(cluster: LocalCluster) -> None:
    processes = [psutil.Process(pid) for pid in children(os.getpid())]
    processes += [each for process in processes for each in process.children(recursive=True)]
    addresses = {
        connection.laddr.ip
        for process in [*processes, psutil.Process()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.cluster
def test_key_value_store_puts_gets_lists_and_deletes(cluster: LocalCluster) -> None:
    assert compat.kv_keys(NAMESPACE) == []
    assert compat.kv_get(b"one", NAMESPACE) is None
    compat.kv_put(b"one", b"1", NAMESPACE)
    compat.kv_put(b"one", b"2", NAMESPACE)
    compat.kv_put(b"other", b"3", NAMESPACE)
    assert sorted(compat.kv_keys(NAMESPACE)) == [b"one", b"other"]
    assert compat.kv_get(b"one", NAMESPACE) == b"2"
    assert compat.kv_get(b"one") is None
    compat.kv_delete(b"one", NAMESPACE)
    compat.kv_delete(b"one", NAMESPACE)
    assert compat.kv_keys(NAMESPACE) == [b"other"]


@pytest.mark.cluster
def test_free_resources_are_per_node(cluster: LocalCluster, node_id: str) -> None:
    assert compat.free_resources()[node_id]["CPU"] == 1


@pytest.mark.cluster
def test_head_node_has_its_resource(cluster: LocalCluster) -> None:
    assert ray.cluster_resources()[compat.HEAD_NODE_RESOURCE] == 1


@pytest.mark.cluster
def test_autoscaler_status_is_empty_without_an_autoscaler(cluster: LocalCluster) -> None:
    assert compat.autoscaler_status() == AutoscalerStatus({}, [])


@pytest.mark.cluster
def test_autoscaler_status_reads_the_report_of_version_1(cluster: LocalCluster) -> None:
    key = DEBUG_AUTOSCALING_STATUS.encode()
    compat.kv_put(key, json.dumps({"autoscaler_report": REPORT}).encode(), namespace=None)
    try:
        assert compat.autoscaler_status() == REPORTED
    finally:
        compat.kv_delete(key, namespace=None)


def test_empty_report_of_version_1_is_an_empty_status() -> None:
    assert compat.parse_autoscaler_report({}) == AutoscalerStatus({}, [])


def test_cluster_status_of_version_2_is_summed_by_node_type() -> None:
    pending, failed = LaunchRequest.Status.PENDING, LaunchRequest.Status.FAILED
    status = ClusterStatus(
        stats=Stats(gcs_request_time_s=0.0),  # 2.55 has no default
        pending_nodes=[NodeInfo("g5", "gpu-small", "i-1", "10.0.0.9")],
        pending_launches=[
            LaunchRequest("g5", "gpu-small", 2, pending, 0),
            LaunchRequest("g6", "gpu-small", 1, pending, 0),
        ],
        failed_launches=[LaunchRequest("p5", "gpu-big", 1, failed, 0, 1, "no quota")],
    )
    assert compat.parse_cluster_status(status) == AutoscalerStatus(
        {"gpu-small": 4}, [("gpu-big", "no quota")]
    )


def test_reload_environment_applies_variables_set_after_the_import() -> None:
    program = """
import os, ray
from ray._raylet import AuthenticationMode, get_authentication_mode
from quire.cluster.fleet.ray import compat
assert get_authentication_mode() != AuthenticationMode.TOKEN
os.environ["RAY_AUTH_MODE"] = "token"
compat.reload_environment()
assert get_authentication_mode() == AuthenticationMode.TOKEN
"""
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=PROGRAM_TIMEOUT_S, env=_without_ray_settings()
    )


def test_muted_ray_prints_no_process_messages(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    message = {"lines": ["a worker died"], "pid": "raylet", "is_err": False, "job": None, "ip": "127.0.0.1"}
    # Ray's listener of errors calls the module's function by this name and with this parameter.
    assert "print_to_stdstream(" in inspect.getsource(ray_worker.listen_error_messages)
    monkeypatch.setattr(ray_worker, "print_to_stdstream", ray_worker.print_to_stdstream)
    compat.mute_process_messages()
    ray_worker.print_to_stdstream(message, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")


def test_ray_command_knows_up_and_down() -> None:
    assert "--yes" in _ray_help("down")
    assert "--yes" in _ray_help("up")
    assert "--disable-usage-stats" in _ray_help("up")


def test_cluster_file_is_completed_with_defaults() -> None:
    completed = compat.complete_cluster_file(_cluster_file())
    assert completed["max_workers"] == 2
    assert completed["available_node_types"]["worker"]["max_workers"] == 2
    assert "file_mounts" in completed


def test_unknown_setting_of_a_cluster_file_is_refused() -> None:
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        compat.complete_cluster_file(_cluster_file() | {"max_worker": 2})


@pytest.mark.cluster
def test_drained_node_is_listed_while_it_still_runs_something(
    clusters: list[LocalCluster], cluster: LocalCluster, node_id: str
) -> None:
    class Actor:
        def ready(self) -> bool:
            return True

    busy: Any = ray.remote(num_cpus=1)(Actor).remote()
    assert ray.get(busy.ready.remote(), timeout=DEADLINE_S)
    assert compat.draining_nodes() == {}
    assert compat.drain_node(node_id, "a test") == ""
    assert compat.draining_nodes() == {node_id: 0}
    clusters.remove(cluster)  # it has no other node for the next test
    cluster.close()


def _cluster_file() -> dict[str, object]:
    node = {"node_config": {"InstanceType": "m5.large", "ImageId": "ami-1"}, "resources": {"CPU": 2}}
    return {
        "cluster_name": "test",
        "max_workers": 2,
        "provider": {"type": "aws", "region": "us-west-2"},
        "auth": {"ssh_user": "ubuntu"},
        "head_node_type": "head",
        "available_node_types": {"head": node, "worker": dict(node)},
    }


def _ray_help(subcommand: str) -> str:
    command = [*compat.RAY_COMMAND, subcommand, "--help"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True
    ).stdout


def _without_ray_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@pytest.mark.cluster
def test_idle_processes_are_started_and_counted(cluster: LocalCluster) -> None:
    (node,) = ray.nodes()
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    deadline = time.monotonic() + DEADLINE_S
    before = compat.num_idle_processes(address, DEADLINE_S)
    compat.start_idle_processes(address, 1, DEADLINE_S)
    while compat.num_idle_processes(address, DEADLINE_S) <= before:
        assert time.monotonic() < deadline, "no process was started"
        time.sleep(0.1)
