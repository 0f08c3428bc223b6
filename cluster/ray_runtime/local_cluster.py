"""LocalCluster: a private Ray instance of this process's own, gone without a trace when it closes.

`attach` is the other way to Ray: to an instance that runs already and goes on without this process.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import ray

from ...proto.errors import ConfigError, ReplicaUnavailable, joined_lines
from ...proto.transport.channel import ChannelAddress
from ..host.closing import Closing
from ..host.janitor import PrivateDirectory
from ..host.processes import ProcessTree, children
from . import compat
from .launch_target import DEFAULT_NAMESPACE

# Ray carries no step and no token; its smallest store is enough.
_OBJECT_STORE_BYTES = 80 << 20
_EXIT_TIMEOUT_S = 5.0
# Ray's own start fails now and then on a busy machine, and then succeeds.
_START_ATTEMPTS = 2
# What Ray's processes wrote last says why one of them did not start.
_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard_agent.log")
_MAX_LOG_LINES = 4

# One a process: Ray's library keeps the first token that it reads, so a second cluster must have the same.
_TOKEN = secrets.token_hex(32)

_log = logging.getLogger(__name__)


class LocalCluster(Closing):
    """Ray on this machine alone, for as long as the object is open: a LaunchTarget. Use it as a context manager.

    Ray's processes listen on every interface, so each instance has a token of its own, and whoever does not
    have it is refused. Ray's processes end with the thread that opened the cluster (PR_SET_PDEATHSIG): open it
    in one that lives as long.

    Args:
        num_cpus: CPU slots; each actor of a replica takes one.
        num_gpus: GPUs that ranks may take; None: all of this machine's.

    Raises:
        ConfigError: this process is connected to a Ray instance already.
        ReplicaUnavailable: Ray did not start, twice; with what its processes wrote last.
    """

    namespace = DEFAULT_NAMESPACE
    outlives_us = False
    resources_per_rank: Mapping[str, float] = {}
    keys = None
    placement_timeout_s = 60.0
    autoscaling_config = None

    def __init__(self, num_cpus: int, num_gpus: int | None = None) -> None:
        _refuse_second_connection()
        self._ray_pids: set[int] = set()  # those that this process started; the others descend from them
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._directory = PrivateDirectory()
            try:
                self._start(num_cpus, num_gpus)
                return
            except Exception as error:
                reason = _why_not_started(error, self.directory)
                self.close()
                if attempt == _START_ATTEMPTS:
                    raise ReplicaUnavailable(f"Ray did not start: {reason}") from error
                _log.warning("Ray did not start, and is started once more: %s", reason)
            except BaseException:
                self.close()
                raise

    @property
    def directory(self) -> Path:
        """For sockets: only this user may enter it, and it goes with the cluster."""
        return self._directory.path

    def channel(self, host: str) -> ChannelAddress:
        """See LaunchTarget."""
        return ChannelAddress.in_directory(self.directory)

    def mailbox(self, replica_id: str, host: str) -> str:
        """See LaunchTarget."""
        return f"ipc://{self.directory}/{replica_id}"

    def guard(self) -> None:
        """Sees to it that no process which runs in the cluster now outlives this one, even one that is killed."""
        self._directory.guard(self._ray_pids)

    def close(self) -> None:
        """Ends every process and removes every file. Safe to call twice."""
        processes = ProcessTree(self._ray_pids)
        ray.shutdown()
        _end(processes)
        self._ray_pids = set()
        self._directory.remove()

    def _start(self, num_cpus: int, num_gpus: int | None) -> None:
        _set_ray_environment()
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
            self.guard()
        compat.mute_process_messages()


class AttachedCluster(Closing):
    """This process's connection to a Ray cluster that runs without it, and goes on when the connection is closed."""

    def close(self) -> None:
        """Safe to call twice."""
        ray.shutdown()


def attach(address: str, namespace: str = DEFAULT_NAMESPACE) -> AttachedCluster:
    """Connects to a running cluster.

    Its token is read where Ray reads it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the file that
    `ray get-auth-token --generate` makes.

    Args:
        address: ``HOST:PORT`` of its head, or ``auto``: RAY_ADDRESS, or the cluster that this machine is a node of.

    Raises:
        ConfigError: this process is connected to a Ray instance already.
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
        raise ConfigError("this process is connected to Ray already; quire makes a connection of its own")


def _set_ray_environment() -> None:
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        # A rank picks its device by ordinal, so that all of them stay visible to each other.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Ray's own handler of SIGTERM would wait for its node to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    compat.reload_environment()


def _choose_authentication() -> None:
    """Ray uses a token only when it is told so before it is imported, or here."""
    has_token = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if "RAY_AUTH_MODE" not in os.environ and (has_token or Path("~/.ray/auth_token").expanduser().is_file()):
        os.environ["RAY_AUTH_MODE"] = "token"
    compat.reload_environment()


def _why_not_started(error: Exception, directory: Path) -> str:
    """The error, and what Ray's processes wrote last."""
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
    """Gives Ray's processes a moment to end, and kills those that do not."""
    with suppress(OSError):
        if left := processes.wait(_EXIT_TIMEOUT_S):
            _log.warning("processes %s did not end and are killed", left)
            processes.kill()
            processes.wait(_EXIT_TIMEOUT_S)
    processes.close()
