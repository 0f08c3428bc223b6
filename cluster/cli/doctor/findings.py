"""Findings: each fact about a machine, whether it is good enough, and what to do if it is not. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ....worker import LIBRARIES
from .facts import MachineFacts, Space

GIB = 1 << 30
MIB = 1 << 20

# Python versions that quire is tested with.
_PYTHONS = ("3.11", "3.12", "3.13")
_MIN_FREE_MEMORY_BYTES = 2 * GIB
# Ray's object store takes 80 MiB, and ranks on one host exchange tensors there. Docker's default is 64 MiB.
_MIN_SHARED_MEMORY_BYTES = 256 * MIB
_MIN_TEMPORARY_BYTES = GIB
_MIN_MODELS_BYTES = 20 * GIB
# Ray's own processes open about 2,000, and each stream of a client one.
_MIN_FILES, _GOOD_FILES = 4096, 16_384
_MIN_PROCESSES = 2048
# bfloat16 in hardware.
_MIN_CAPABILITY = (8, 0)
_PORT_OPTIONS = {"listen": "gRPC", "http": "HTTP"}


class Verdict(StrEnum):
    """Rating of a fact: nothing to do, worth knowing, slower than it could be, or the cause of a failure."""

    OK = "ok"
    NOTE = "note"
    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about the machine.

    Attributes:
        subject: for example ``cores``.
        value: what was found, in words.
        problem: what it causes; empty if nothing.
        remedy: what to do about it; empty if nothing needs to be done.
    """

    subject: str
    value: str
    verdict: Verdict = Verdict.OK
    problem: str = ""
    remedy: str = ""


def examine(facts: MachineFacts) -> list[Finding]:
    """Return the findings about a machine, in the order of `quire doctor`."""
    return [finding for check in _CHECKS for finding in check(facts)]


def _python(facts: MachineFacts) -> Iterator[Finding]:
    if facts.python.rpartition(".")[0] in _PYTHONS:
        yield Finding("Python", facts.python)
        return
    versions = f"{_PYTHONS[0]} to {_PYTHONS[-1]}"
    yield Finding(
        "Python",
        facts.python,
        Verdict.FAILS,
        f"quire supports {versions}",
        f"make an environment with {versions}",
    )


def _packages(facts: MachineFacts) -> Iterator[Finding]:
    for name in ("quire", "torch", "ray", "transformers"):
        version = facts.packages.get(name)
        if version is not None:
            yield Finding(name, version)
        elif name != "quire":  # a source tree that was never installed works as well
            yield Finding(name, "not installed", Verdict.FAILS, "quire needs it", "pip install quire")


def _cores(facts: MachineFacts) -> Iterator[Finding]:
    value = f"{facts.num_cores}"
    if facts.cpu_quota is not None and facts.cpu_quota < facts.num_cores:
        yield Finding(
            "cores",
            f"{value}, of which the container may use the time of {facts.cpu_quota:g}",
            Verdict.SLOW,
            "ranks start a thread per core and are stopped when the quota is used up",
            "give the container whole cores: docker run --cpuset-cpus, or Kubernetes' static CPU manager",
        )
    elif facts.num_cores < 2:
        yield Finding(
            "cores", value, Verdict.SLOW, "gateway, scheduler and ranks share one core", "use 2 cores or more"
        )
    else:
        yield Finding("cores", value)


def _ops(facts: MachineFacts) -> Iterator[Finding]:
    ops = facts.ops
    if ops.instruction_set == "baseline":
        yield Finding(
            "instruction set",
            ops.instruction_set,
            Verdict.SLOW,
            "the processor has no AVX2, or the virtual machine hides it",
            "use a processor with AVX2 or AVX-512; for virtual machines pass the host's processor through",
        )
    else:
        yield Finding("instruction set", ops.instruction_set)
    if ops.problem:
        yield Finding(
            "C++ ops",
            "none",
            Verdict.SLOW,
            f"on CPUs PyTorch computes instead: {ops.problem}",
            "install a wheel for this platform, or a C++ compiler (apt-get install g++)",
        )
    elif ops.path is None:
        yield Finding(
            "C++ ops",
            "not built yet",
            Verdict.NOTE,
            "the first start on a CPU compiles them, for 10 to 60 s of processor time",
        )
    else:
        yield Finding("C++ ops", "of the wheel" if ops.is_prebuilt else f"built, {ops.path}")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    if facts.memory_bytes is None:
        return
    value = f"{_gib(facts.memory_bytes)} available"
    if facts.memory_bytes < _MIN_FREE_MEMORY_BYTES:
        yield Finding(
            "memory",
            value,
            Verdict.FAILS,
            "Ray and one rank need about 2 GiB beside the weights",
            "free some memory",
        )
    else:
        yield Finding("memory", value)


def _shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    space = facts.shared_memory
    if space.free_bytes is None:
        yield Finding("/dev/shm", "missing", Verdict.FAILS, "Ray needs it", "mount a tmpfs there")
    elif space.free_bytes < _MIN_SHARED_MEMORY_BYTES:
        yield Finding(
            "/dev/shm",
            _size(space),
            Verdict.FAILS,
            f"Ray's object store and several ranks on one host need {_MIN_SHARED_MEMORY_BYTES // MIB} MiB",
            "docker run --ipc=host or --shm-size=1g; on Kubernetes an emptyDir with medium: Memory",
        )
    else:
        yield Finding("/dev/shm", _size(space))


def _disk(facts: MachineFacts) -> Iterator[Finding]:
    yield _disk_finding(
        "temporary files",
        facts.temporary,
        _MIN_TEMPORARY_BYTES,
        Verdict.FAILS,
        "Ray writes its logs there",
        "TMPDIR",
    )
    yield _disk_finding(
        "models",
        facts.models,
        _MIN_MODELS_BYTES,
        Verdict.NOTE,
        "models of the hub are downloaded there",
        "HF_HOME",
    )
    if facts.ops.path is None and not facts.cache.is_writable:
        yield Finding(
            "cache",
            facts.cache.path,
            Verdict.SLOW,
            "is not writable, so the C++ ops cannot be kept there",
            "set QUIRE_CACHE_DIR to a writable folder",
        )


def _disk_finding(
    subject: str, space: Space, min_bytes: int, verdict: Verdict, use: str, variable: str
) -> Finding:
    value = f"{space.path}, {_size(space)}"
    if space.is_writable and space.free_bytes is not None and space.free_bytes >= min_bytes:
        return Finding(subject, value)
    why = "is not writable" if not space.is_writable else f"has less than {_gib(min_bytes)}"
    return Finding(subject, value, verdict, f"{why}; {use}", f"free some space, or set {variable}")


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    files = facts.max_files
    if files is not None and files < _GOOD_FILES:
        yield Finding(
            "ulimit -n",
            f"{files}",
            Verdict.FAILS if files < _MIN_FILES else Verdict.NOTE,
            "Ray opens some 2,000 files, and each client's connection is one",
            "ulimit -n 65536; systemd: LimitNOFILE=65536; docker run --ulimit nofile=65536:65536",
        )
    else:
        yield Finding("ulimit -n", "unlimited" if files is None else f"{files}")
    processes = facts.max_processes
    if processes is not None and processes < _MIN_PROCESSES:
        yield Finding(
            "ulimit -u", f"{processes}", Verdict.FAILS, "Ray starts hundreds of threads", "ulimit -u 16384"
        )
    else:
        yield Finding("ulimit -u", "unlimited" if processes is None else f"{processes}")
    locked = facts.max_locked_bytes
    if locked is not None and facts.has_infiniband:
        yield Finding(
            "ulimit -l",
            f"{locked} bytes",
            Verdict.FAILS,
            "NCCL over InfiniBand or EFA locks memory",
            "docker run --ulimit memlock=-1:-1; containerd and systemd: LimitMEMLOCK=infinity",
        )


def _nixl(facts: MachineFacts) -> Iterator[Finding]:
    version = facts.packages.get("nixl")
    if version is not None:
        yield Finding("NIXL", f"{version}, for --kv-transport nixl")
    elif facts.has_infiniband:
        yield Finding(
            "NIXL",
            "not installed",
            Verdict.NOTE,
            "KV blocks travel between hosts over encrypted TCP, not over RDMA",
            "pip install 'quire[nixl]'",
        )


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    driver = facts.driver
    if driver is None or not driver.gpus:
        yield Finding("GPUs", "none", Verdict.NOTE, "models run on the CPU")
        return
    yield Finding("driver", f"{driver.version}, CUDA {_dotted(driver.cuda)}")
    for number, gpu in enumerate(driver.gpus):
        subject, value = f"GPU {number}", f"{gpu.name}, {_gib(gpu.memory_bytes)}, {_dotted(gpu.capability)}"
        if gpu.capability < _MIN_CAPABILITY:
            yield Finding(subject, value, Verdict.SLOW, "it has no bfloat16", "serve with --dtype float16")
        else:
            yield Finding(subject, value)
    yield from _gpu_software(facts, driver.cuda, len(driver.gpus))
    yield from _libraries(facts, driver.gpus[0].capability)


def _libraries(facts: MachineFacts, capability: tuple[int, int]) -> Iterator[Finding]:
    """Yield a finding for each library of kernels: quire's own compute where it is missing or does not fit."""
    for library in LIBRARIES:
        version = facts.libraries.get(library.option, "")
        if version and not library.find_misfit(capability):
            yield Finding(library.title, f"{version}, for {library.use}")
        elif version:
            yield Finding(
                library.title, version, Verdict.NOTE, f"not used: {library.find_misfit(capability)}"
            )
        else:
            yield Finding(
                library.title, "not installed", Verdict.NOTE, f"{library.use}: quire's own kernels compute it"
            )


def _gpu_software(facts: MachineFacts, cuda: tuple[int, int], num_gpus: int) -> Iterator[Finding]:
    if not facts.torch_cuda:
        yield Finding(
            "torch's CUDA",
            "none",
            Verdict.FAILS,
            "this build of torch cannot use the GPUs",
            "install torch for CUDA, as pytorch.org says",
        )
        return
    built_for = tuple(int(part) for part in facts.torch_cuda.split(".")[:2])
    if built_for[0] > cuda[0]:
        yield Finding(
            "torch's CUDA",
            facts.torch_cuda,
            Verdict.FAILS,
            f"the driver supports CUDA {_dotted(cuda)}",
            "update the driver, or install torch for an older CUDA",
        )
    else:
        yield Finding("torch's CUDA", facts.torch_cuda)
    if "triton" in facts.packages:
        yield Finding("triton", facts.packages["triton"])
    else:
        yield Finding(
            "triton", "not installed", Verdict.SLOW, "PyTorch computes instead", "pip install 'quire[triton]'"
        )
    if num_gpus > 1 and not facts.nccl:
        yield Finding(
            "NCCL",
            "not installed",
            Verdict.FAILS,
            "several GPUs need it",
            "install torch for CUDA with its libraries",
        )
    elif facts.nccl:
        yield Finding("NCCL", facts.nccl)


def _ports(facts: MachineFacts) -> Iterator[Finding]:
    for option, protocol in _PORT_OPTIONS.items():
        address = facts.taken_ports.get(option)
        if address is None:
            yield Finding(f"{protocol} port", "free")
        else:
            yield Finding(
                f"{protocol} port",
                address,
                Verdict.NOTE,
                "another process listens there",
                f"quire serve --{option} HOST:PORT",
            )


_CHECKS: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _cores,
    _ops,
    _memory,
    _shared_memory,
    _disk,
    _limits,
    _nixl,
    _gpus,
    _ports,
)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _size(space: Space) -> str:
    return "unknown size" if space.free_bytes is None else f"{_gib(space.free_bytes)} free"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
