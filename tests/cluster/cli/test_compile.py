"""`quire compile`: options, and a run that compiles the kernels of a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster.cli.compile import CAPABILITIES, engine_of_gpu
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import GPU_MEMORY_GB, gpu_bytes
from quire.proto.errors import ConfigError


def test_every_gpu_has_a_memory() -> None:
    assert set(CAPABILITIES) <= set(GPU_MEMORY_GB)


def test_engine_has_the_limits_of_the_gpu_and_blocks_for_its_largest_step(make_model: Any) -> None:
    options = EngineOptions(str(make_model("llama", num_attention_heads=4)), tensor_parallel_size=2)
    config = engine_of_gpu(options, gpu_bytes("h200"))
    assert config.parallel.device == "cuda"
    assert config.scheduler.max_num_seqs == 1024
    assert config.cache.num_kv_blocks is not None
    assert config.cache.num_kv_blocks * config.cache.block_size > config.scheduler.max_num_batched_tokens


def test_fused_all_reduce_is_refused(make_model: Any) -> None:
    options = EngineOptions(str(make_model("llama")), fused_all_reduce=True)
    with pytest.raises(ConfigError, match="needs the memory of other GPUs"):
        engine_of_gpu(options, gpu_bytes("h100"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_of_a_small_model_are_compiled_into_a_directory(make_model: Any, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    command = [
        sys.executable, "-m", "quire", "compile", str(make_model("llama", num_hidden_layers=1)), "--gpu", "h200",
        "--max-num-seqs", "4", "--no-cuda-graphs", "--cache-dir", str(tmp_path),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=3 * PROGRAM_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_compiled = int(done.stdout.split()[1])
    assert num_compiled > 20
    assert len(list(tmp_path.glob("*/*.cubin"))) == num_compiled
