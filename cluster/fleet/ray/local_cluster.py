"""LocalCluster: a private Ray instance of this process, removed without a trace on close.

`attach` instead connects to an instance that already runs and outlives this process.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import ray

from ....proto.errors import ConfigError, ReplicaUnavailable, joined_lines
from ....proto.transport.channel import ChannelAddress
from ...os_utils.cleanup import PrivateDirectory
from ...os_utils.closing import Closing
from ...os_utils.processes import ProcessTree, children
from . import compat
from .launch_target import DEFAULT_NAMESPACE

# Steps and tokens do not travel through Ray; its smallest object store is enough.
_OBJECT_STORE_BYTES = 80 << 20
_EXIT_TIMEOUT_S = 5.0
# On a busy machine Ray's start fails now and then, and succeeds the second time.
_START_ATTEMPTS = 2
# The last lines of these logs say why a process of Ray did not start.
_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard_agent.log")
_MAX_LOG_LINES = 4

PRELOADED_MODULE = "quire.cluster.fleet.ray.preload"
# One per process: Ray's library keeps the first token that it reads, so a second cluster needs the same.
_TOKEN = secrets.token_hex(32)
# Holds a cluster's token, the shared secret of its nodes, which lets its holder run code on all of them.
TOKEN_FILE = "~/.ray/auth_token"
_OTHERS = 0o077

_log = logging.getLogger(__name__)


class LocalCluster(Closing):
    """Ray on this machine only, until closed: a LaunchTarget and a context manager.

    Ray's processes listen on loopback, where a secret token keeps other users of the machine out. They end with the
    thread that opened the cluster (PR_SET_PDEATHSIG): open it in a thread that lives as long.

    Args:
        num_cpus: CPU slots; each actor of a replica takes one.
        num_gpus: GPUs for the ranks; None for all of this machine's.

    Raises:
        ConfigError: this process is already connected to a Ray instance.
        ReplicaUnavailable: Ray did not start in two attempts; quotes the end of its logs.
    """

    namespace = DEFAULT_NAMESPACE
    is_detached = False
    resources_per_rank: Mapping[str, float] = {}
    keys = None
    placement_timeout_s = 60.0
    node_selectors: Sequence[Mapping[str, str]] = ({},)
    autoscaling_config = None

    def __init__(self, num_cpus: int, num_gpus: int | None = None) -> None:
        _refuse_second_connection()
        self._ray_pids: set[int] = set()  # this process's children; Ray's other processes descend from them
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._directory = PrivateDirectory()
            try:
                self._start(num_cpus, num_gpus)
                return
            except Exception as error:
                reason = _start_failure(error, self.directory)
                self.close()
                if attempt == _START_ATTEMPTS:
                    raise ReplicaUnavailable(f"Ray did not start: {reason}") from error
                _log.warning("Ray did not start, retrying: %s", reason)
            except BaseException:
                self.close()
                raise

    @property
    def directory(self) -> Path:
        """Directory for sockets, which only this user may enter. Removed with the cluster."""
        return self._directory.path

    def channel_address(self, host: str) -> ChannelAddress:
        return ChannelAddress.in_directory(self.directory)

    def mailbox_endpoint(self, replica_id: str, host: str) -> str:
        return f"ipc://{self.directory}/{replica_id}"

    def on_processes_started(self) -> None:
        """Have every process that now runs in the cluster killed after this process ends, even if it is killed."""
        self._directory.kill_on_exit(self._ray_pids)

    def close(self) -> None:
        """End every process and remove every file. Safe to call twice."""
        processes = ProcessTree(self._ray_pids)
        ray.shutdown()
        processes.kill()  # they ignore SIGTERM, and nothing that they hold outlives them
        _end(processes)
        self._ray_pids = set()
        self._directory.remove()

    def _start(self, num_cpus: int, num_gpus: int | None) -> None:
        _set_ray_environment(num_cpus)
        others = children(os.getpid())
        try:
            # Ray lets every user of the machine enter its folder, so the folder is inside a private one.
            compat.start_local(
                self.directory / "r",
                namespace=self.namespace,
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        finally:
            self._ray_pids = children(os.getpid()) - others
            self.on_processes_started()
        compat.mute_process_messages()


class AttachedCluster(Closing):
    """Connection of this process to a Ray cluster that it did not start, and that keeps running after `close`."""

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        ray.shutdown()


def attach(address: str, namespace: str = DEFAULT_NAMESPACE) -> AttachedCluster:
    """Connect to a running cluster.

    Ray reads the cluster's token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the file that
    `ray get-auth-token --generate` makes.

    Args:
        address: ``HOST:PORT`` of the head node, or ``auto`` for RAY_ADDRESS or the cluster that this machine is a
            node of.

    Raises:
        ConfigError: this process is already connected to a Ray instance.
        ReplicaUnavailable: no cluster answers there, or it refuses the token.
    """
    _refuse_second_connection()
    _choose_authentication()
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        ray.shutdown()
        where = f"at {address}" if address != "auto" else "that this machine is a node of"
        raise ReplicaUnavailable(f"no Ray cluster {where} can be joined: {joined_lines(error)}") from error
    compat.mute_process_messages()
    return AttachedCluster()


def _refuse_second_connection() -> None:
    if ray.is_initialized():
        raise ConfigError(
            "this process is connected to Ray already, must not be: quire makes its own connection; "
            "call ray.shutdown() first"
        )


def _set_ray_environment(num_cpus: int) -> None:
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Each rank selects its GPU by ordinal and needs to see all of them.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray starts a process per CPU slot with the cluster; an actor that gets one finds its modules imported.
        "RAY_preload_python_modules": PRELOADED_MODULE,
        # Otherwise Ray ends these processes when a placement group reserves the slots, just before they are needed.
        "RAY_num_workers_soft_limit": str(num_cpus),
        # Otherwise Ray gives its processes a niceness of 15, and anything else on the machine delays every step.
        "RAY_worker_niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
        # Otherwise Ray's handler of SIGTERM waits for its node to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    compat.reload_environment()


def _choose_authentication() -> None:
    """Enable Ray's token authentication if there is a token: by itself Ray reads the mode only when imported."""
    has_token = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if "RAY_AUTH_MODE" not in os.environ and (has_token or has_token_file()):
        os.environ["RAY_AUTH_MODE"] = "token"
    restrict_token_file()
    compat.reload_environment()


def _start_failure(error: Exception, directory: Path) -> str:
    """Return the error and the last lines of Ray's logs."""
    reasons = [joined_lines(error)]
    for name in _LOGS:
        for log in sorted(directory.glob(f"r/session_*/logs/{name}")):
            if log.parent.parent.is_symlink():  # session_latest
                continue
            with suppress(OSError):
                lines = [
                    line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()
                ]
                if lines:
                    reasons.append(f"{name}: " + " | ".join(lines[-_MAX_LOG_LINES:]))
    return "; ".join(reasons)


def _end(processes: ProcessTree) -> None:
    """Wait for Ray's processes, which have been killed, to end."""
    with suppress(OSError):
        if remaining := processes.wait(_EXIT_TIMEOUT_S):
            _log.warning("Ray's processes %s did not end in %g s", remaining, _EXIT_TIMEOUT_S)
    processes.close()


def has_token_file() -> bool:
    return _path().is_file()


def restrict_token_file() -> None:
    """Make Ray's token file readable for its owner alone. `ray get-auth-token --generate` lets everyone read it.

    Does nothing if there is none, or if it belongs to somebody else.
    """
    path = _path()
    try:
        state = path.stat()
        if state.st_uid != os.geteuid() or not state.st_mode & _OTHERS:
            return
        path.chmod(0o600)
    except OSError:
        return
    _log.warning("other users could read %s, Ray's token; its mode is 600 now", path)


def _path() -> Path:
    return Path(TOKEN_FILE).expanduser()
