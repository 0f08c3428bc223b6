"""Compilation of a rank's kernel variants while it reads its weights, once for all ranks of a node.

A rank that compiles while it warms up compiles one variant at a time, in 1.5 to 4 s each. A process beside it records
the variants as `quire compile` does and compiles them on all cores into Triton's cache on disk, where the warm-up
finds them. It is an attempt: what it does not compile, the warm-up does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ...proto.config import EngineConfig

# A variant takes 1.5 to 4 s of a core, and a model has 40 to 200.
TIMEOUT_S = 600.0
_KERNELS = Path(__file__).parents[2] / "kernels" / "gpu"
PROGRAM = "from quire.worker.ahead.at_start import serve_request; serve_request()"

_log = logging.getLogger(__name__)


class Compilation(Protocol):
    """A compilation that runs beside the rank."""

    def wait(self) -> None:
        """Wait until it has ended, at most TIMEOUT_S from its begin. Safe to call twice."""
        ...


class NoCompilation:
    """Compilation of a rank that needs none."""

    def wait(self) -> None:
        pass


NO_COMPILATION = NoCompilation()


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Order to the process that compiles.

    Attributes:
        config: as for `record_variants`.
        capability: compute capability times 10.
        gpu_bytes: memory of a GPU.
    """

    config: EngineConfig
    capability: int
    gpu_bytes: int

    @property
    def stamp(self) -> str:
        """Return the name of a file that says that these variants are compiled: of the engine and the kernels."""
        digest = hashlib.blake2b(
            repr((self.config, self.capability, self.gpu_bytes)).encode(), digest_size=16
        )
        for path in sorted(_KERNELS.rglob("*.py")):
            digest.update(path.read_bytes())
        return f"quire-{digest.hexdigest()}"


class StartCompilation:
    """The process that compiles, which ends with this one.

    Args:
        program: Python code of the process. It reads the pickled request from its standard input and prints a report
            as JSON.
    """

    def __init__(self, request: CompileRequest, program: str = PROGRAM) -> None:
        self._deadline = time.monotonic() + TIMEOUT_S
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: `wait` says so
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()  # and stays open: its end tells the process that this one has ended

    def wait(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            try:
                status = process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _log.warning(
                    "kernels were not compiled beside the start in %g s; the warm-up does it", TIMEOUT_S
                )
                return
            report = process.stdout.read()
        lines = report.decode(errors="replace").splitlines()
        if status == 0 and lines:
            _log.info("%s", json.loads(lines[-1]))
        else:
            _log.warning("kernels cannot be compiled beside the start (its process ended with %d)", status)


def compile_at_start(config: EngineConfig, device: torch.device) -> Compilation:
    """Begin to compile the variants of an engine's ranks on a GPU; on other devices do nothing."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or is_interpreted or importlib.util.find_spec("triton") is None:
        return NO_COMPILATION
    # The fused kernels need the memory of other GPUs, and compile while the ranks warm up.
    config = replace(config, parallel=replace(config.parallel, fused_all_reduce=False))
    major, minor = torch.cuda.get_device_capability(device)
    total_memory = torch.cuda.get_device_properties(device).total_memory
    return StartCompilation(CompileRequest(with_few_blocks(config), 10 * major + minor, total_memory))


def with_few_blocks(config: EngineConfig) -> EngineConfig:
    """Return the engine with as many KV blocks as its ranks need to prepare themselves."""
    limits, num_groups = config.scheduler, sum(config.cache_layout.splits)
    num_blocks = limits.max_num_batched_tokens // config.cache.block_size + 2 * limits.max_num_seqs + 64
    return config.with_num_blocks(num_blocks * num_groups * config.parallel.num_kv_partitions)
