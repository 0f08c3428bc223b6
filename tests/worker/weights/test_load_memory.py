"""Bytes that a rank reads and memory that it holds during a load: its own slices and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import PROGRAM_TIMEOUT_S

# Loads rank 1 of 2 of each model in a process of its own, and prints peak memory and bytes read. The processes are
# forked when torch and transformers are imported, which takes 4 s of a core, and before either starts a thread.
PROGRAM = """
import json, os, sys
from pathlib import Path

import torch
import transformers

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.kernels.linear import linear, pack
from quire.worker.models.transformers import transformers_model
from quire.worker.rank.runner import ModelRunner


class Rank:
    rank, size = 1, 2


def status(path, field):
    (line,) = [line for line in Path(path).read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1])


def load(folder):
    options = EngineOptions(
        folder, tensor_parallel_size=2, device="cpu", dtype="float32", num_kv_blocks=2, max_num_seqs=1,
        max_model_len=64,
    )
    config = resolve(options, Machine.this())
    linear(torch.ones(8, 512), pack(torch.ones(512, 512)))  # threads, libraries and their scratch memory
    with torch.device("meta"):  # the modules' code
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    resident, read = status("/proc/self/status", "VmRSS") << 10, status("/proc/self/io", "rchar")
    runner = ModelRunner(config, Rank())
    peak, read_after = status("/proc/self/status", "VmHWM") << 10, status("/proc/self/io", "rchar")
    print(json.dumps({"peak": peak - resident, "read": read_after - read}), flush=True)


for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        load(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
HEADS = {"num_attention_heads": 8, "vocab_size": 2048}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_peak_memory_and_reads_are_those_of_own_slices(make_model: Any) -> None:
    folders = [
        make_model(
            "llama", hidden_size=512, num_hidden_layers=10, intermediate_size=1536, num_key_value_heads=8,
            head_dim=64, **HEADS,
        ),
        # By transformers' modules.
        make_model("gpt_neox", hidden_size=512, num_hidden_layers=12, intermediate_size=2048, **HEADS),
    ]  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    for folder, line in zip(folders, done.stdout.splitlines(), strict=True):
        measured = json.loads(line)
        whole = (folder / "model.safetensors").stat().st_size
        assert whole > 100e6
        # Half of each matrix; norms and biases of row-parallel layers, read in full, add a thousandth.
        # Pages that are mapped, to slice columns, do not count as read.
        assert measured["read"] < 1.02 * whole / 2, (folder, measured)
        assert measured["peak"] < 1.15 * whole / 2, (folder, measured)
