"""LocalCluster: a private Ray instance of this process's own, gone without a trace when it closes."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

import ray
from ray._private import worker as ray_worker

from ..proto.errors import ConfigError, ReplicaUnavailable
from .closing import Closing
from .janitor import PrivateDirectory
from .processes import ProcessTree, children

# Ray carries no step and no token; its smallest store is enough.
_OBJECT_STORE_BYTES = 80 << 20
_EXIT_TIMEOUT_S = 5.0

# One a process: Ray's library keeps the first token that it reads, so a second cluster must have the same.
_TOKEN = secrets.token_hex(32)

_log = logging.getLogger(__name__)


class LocalCluster(Closing):
    """Ray on this machine alone, for as long as the object is open. Use it as a context manager.

    Ray's processes listen on every interface, so each instance has a token of its own, and whoever does not
    have it is refused. Ray's processes end with the thread that opened the cluster (PR_SET_PDEATHSIG): open it
    in one that lives as long.

    Args:
        num_cpus: CPU slots; each actor of a replica takes one.
        num_gpus: GPUs that ranks may take; None: all of this machine's.

    Raises:
        ConfigError: this process is connected to a Ray instance already.
        ReplicaUnavailable: Ray did not start.
    """

    def __init__(self, num_cpus: int, num_gpus: int | None = None) -> None:
        if ray.is_initialized():
            raise ConfigError("this process is connected to Ray already; quire starts an instance of its own")
        self._directory = PrivateDirectory()
        self._ray_pids: set[int] = set()  # those that this process started; the others descend from them
        try:
            self._start(num_cpus, num_gpus)
        except Exception as error:
            self.close()
            raise ReplicaUnavailable(f"Ray did not start: {error}".partition("\n")[0]) from error
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> Path:
        """For sockets: only this user may enter it, and it goes with the cluster."""
        return self._directory.path

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
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                # Ray opens its own folder to everybody.
                _temp_dir=str(self.directory / "r"),
            )
        finally:
            self._ray_pids = children(os.getpid()) - others
            self.guard()
        # Ray prints its own account of every process that dies to this process's stdout. Ours names the rank.
        ray_worker.print_to_stdstream = lambda *_, **__: None


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
    # Ray reads its environment when it is imported; this makes it read it again.
    ray._raylet.Config.initialize("")


def _end(processes: ProcessTree) -> None:
    """Gives Ray's processes a moment to end, and kills those that do not."""
    with suppress(OSError):
        if left := processes.wait(_EXIT_TIMEOUT_S):
            _log.warning("processes %s did not end and are killed", left)
            processes.kill()
            processes.wait(_EXIT_TIMEOUT_S)
    processes.close()
