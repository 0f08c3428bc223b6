"""FakeCloud: a Ray cluster with the real autoscaler and fake machines, which are raylets on this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from ray_nodes import RayNodes

_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_HEAD_TYPE = "ray.head.default"


class FakeCloud(RayNodes):
    """A head node, and a node type whose nodes the autoscaler starts and ends.

    Ray's own AutoscalingCluster does not start from the wheel, and it ends every Ray on the machine.

    Args:
        node: resources of the node type ``worker``.
        max_nodes: most nodes of that type.
        idle_s: idle time after which a node ends.

    Attributes:
        config: the autoscaler's file.
    """

    def __init__(
        self, head: Mapping[str, float], node: Mapping[str, float], max_nodes: int, idle_s: float = 6.0
    ) -> None:
        self._node = dict(node)
        self._max_nodes = max_nodes
        self._idle_s = idle_s
        super().__init__(head)

    @property
    def environment(self) -> dict[str, str]:
        own = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "0"}
        return super().environment | own

    @property
    def config(self) -> Path:
        return self._directory / "autoscaler.json"

    def node_pids(self) -> dict[str, int]:
        """Return node_id |-> pid of its raylet, of the nodes that the autoscaler started."""
        found = {}
        for process in psutil.process_iter(["name", "cmdline"]):
            with suppress(psutil.Error):
                if process.info["name"] == "raylet" and str(self._directory) in " ".join(
                    process.info["cmdline"]
                ):
                    node_id = process.environ().get("RAY_OVERRIDE_NODE_ID_FOR_TESTING")
                    if node_id is not None and not node_id.endswith("00000"):  # the head's id ends so
                        found[node_id] = process.pid
        return found

    def close(self) -> None:
        """End all nodes. The head's end does not end the nodes that the autoscaler started."""
        super().close()
        for process in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error, TypeError):
                if str(self._directory) in " ".join(process.info["cmdline"]):
                    os.kill(process.pid, signal.SIGKILL)

    def _head_options(self, ip: str, port: int) -> list[str]:
        head_type = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
        worker = {
            "resources": self._node | {"object_store_memory": 80_000_000},
            "labels": {},
            "node_config": {},
            "min_workers": 0,
            "max_workers": self._max_nodes,
        }
        empty = ("head_node", "auth", "worker_nodes", "file_mounts")
        lists = (
            "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands",
            "head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
        )  # fmt: skip
        config = {
            "cluster_name": "fake",
            "max_workers": self._max_nodes,
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": self._idle_s / 60,
            "provider": {
                "type": "external",
                "module": _PROVIDER,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "gcs_address": f"{ip}:{port}",
            },
            "available_node_types": {_HEAD_TYPE: head_type, "worker": worker},
            "head_node_type": _HEAD_TYPE,
            "file_mounts_sync_continuously": False,
            **{name: {} for name in empty},
            **{name: [] for name in lists},
        }
        self.config.write_text(json.dumps(config))
        return [*super()._head_options(ip, port), f"--autoscaling-config={self.config}"]
