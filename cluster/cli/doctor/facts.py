"""MachineFacts: measurements of this machine, without judgment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ....worker import LIBRARIES, LibraryState, available_bytes, cache_directory, library_state
from ...config.nvml import GpuDriver, gpu_driver
from ...config.server_options import ServerOptions

PACKAGES = ("quire", "torch", "ray", "transformers", "triton", "grpcio", "huggingface_hub", "nixl")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_SHARED_MEMORY = Path("/dev/shm")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_INFINIBAND = Path("/dev/infiniband")


@dataclass(frozen=True, slots=True)
class Space:
    """A file system.

    Attributes:
        free_bytes, total_bytes: None if the path does not exist.
        is_writable: this user may write there.
    """

    path: str
    free_bytes: int | None
    total_bytes: int | None = None
    is_writable: bool = True


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Measurements of a machine.

    Attributes:
        num_cores: number of cores that this process may run on.
        cpu_quota: cores whose time the container may use; None without a limit.
        memory_bytes: available now; None if unknown.
        max_files, max_processes, max_locked_bytes: soft limits; None for unlimited.
        packages: name |-> version, without those that are not installed.
        torch_cuda: CUDA version that torch was built for; empty for a build without.
        nccl: version of NCCL's package; empty if it is not installed.
        libraries: option |-> version of the installed libraries of GPU kernels.
        taken_ports: option of `quire serve` |-> its default address, if another process listens there.
    """

    python: str
    num_cores: int
    cpu_quota: float | None
    ops: LibraryState
    memory_bytes: int | None
    shared_memory: Space
    temporary: Space
    cache: Space
    models: Space
    max_files: int | None
    max_processes: int | None
    max_locked_bytes: int | None
    driver: GpuDriver | None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str = ""
    nccl: str = ""
    has_infiniband: bool = False
    libraries: Mapping[str, str] = field(default_factory=dict)
    taken_ports: Mapping[str, str] = field(default_factory=dict)


def machine_facts() -> MachineFacts:
    """Measure this machine. Takes some 0.1 s, and imports neither torch nor Ray."""
    return MachineFacts(
        python=platform.python_version(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=read_cpu_quota(_CPU_QUOTA),
        ops=_ops_state(),
        memory_bytes=available_bytes(),
        shared_memory=space_at(_SHARED_MEMORY),
        temporary=space_at(Path(tempfile.gettempdir())),
        cache=space_at(cache_directory()),
        models=space_at(_models_folder()),
        max_files=_soft_limit(resource.RLIMIT_NOFILE),
        max_processes=_soft_limit(resource.RLIMIT_NPROC),
        max_locked_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        driver=gpu_driver(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        torch_cuda=_torch_cuda(),
        nccl=next(filter(None, map(_version, _NCCL_PACKAGES)), ""),
        has_infiniband=_INFINIBAND.is_dir(),
        libraries={each.option: each.version for each in LIBRARIES if each.version},
        taken_ports=_taken_ports(),
    )


def read_cpu_quota(path: Path) -> float | None:
    """Return the cores of a ``cpu.max`` file of Linux's control groups; None without a limit."""
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def space_at(path: Path) -> Space:
    """Return the space of a folder, or of the closest existing folder above a missing one."""
    existing = next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    if existing is None:
        return Space(str(path), None, is_writable=False)
    usage = shutil.disk_usage(existing)
    return Space(str(path), usage.free, usage.total, os.access(existing, os.W_OK))


def _ops_state() -> LibraryState:
    try:
        return library_state()
    except ValueError as error:  # QUIRE_CPU_ISA names a set that this processor lacks
        return LibraryState("unknown", problem=str(error))


def _models_folder() -> Path:
    """Return the cache of huggingface_hub, by its documented variables."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _soft_limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _torch_cuda() -> str:
    """Return torch's CUDA version from its file of versions: importing torch takes a second or more."""
    found = importlib.util.find_spec("torch")
    for folder in () if found is None else found.submodule_search_locations or ():
        with suppress(OSError):
            text = Path(folder, "version.py").read_text()
            if match := re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE):
                return match[1]
    return ""


def _taken_ports() -> dict[str, str]:
    options = ServerOptions()
    defaults = {"listen": options.listen, "http": options.http}
    return {option: address for option, address in defaults.items() if not _can_listen(address)}


def _can_listen(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True
