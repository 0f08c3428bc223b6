"""Bytes that a rank reads and memory that it holds during a load: its own slices and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Runs in a process of its own: loads rank 1 of 2 and prints peak memory and bytes read.
PROGRAM = """
import json, sys
from pathlib import Path

import torch
import transformers

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.kernels.linear import linear, pack
from quire.worker.models import transformers_model
from quire.worker.runner import ModelRunner


class Rank:
    rank, size = 1, 2


def status(path, field):
    (line,) = [line for line in Path(path).read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1])


options = EngineOptions(
    sys.argv[1], tensor_parallel_size=2, device="cpu", dtype="float32", num_kv_blocks=2, max_num_seqs=1,
    max_model_len=64,
)
config = resolve(options, Machine.this())
linear(torch.ones(8, 512), pack(torch.ones(512, 512)))  # threads, libraries and their scratch memory
with torch.device("meta"):  # the modules' code
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
resident, read = status("/proc/self/status", "VmRSS") << 10, status("/proc/self/io", "rchar")
runner = ModelRunner(config, Rank())
peak, read_after = status("/proc/self/status", "VmHWM") << 10, status("/proc/self/io", "rchar")
print(json.dumps({"peak": peak - resident, "read": read_after - read}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"num_hidden_layers": 10, "intermediate_size": 1536}),
        ("gpt_neox", {"num_hidden_layers": 12, "intermediate_size": 2048}),  # by transformers' modules
    ],
)
def test_peak_memory_and_reads_are_those_of_own_slices(
    make_model: Any, kind: str, sizes: dict[str, int]
) -> None:
    heads = {"num_attention_heads": 8, "vocab_size": 2048}
    if kind == "llama":
        heads |= {"num_key_value_heads": 8, "head_dim": 64}
    folder = make_model(kind, hidden_size=512, **heads, **sizes)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    whole = (folder / "model.safetensors").stat().st_size
    assert whole > 100e6
    # Half of each matrix; norms and biases of row-parallel layers, read in full, add a thousandth.
    assert whole / 2 < measured["read"] < 1.02 * whole / 2, measured
    assert measured["peak"] < 1.15 * whole / 2, measured
