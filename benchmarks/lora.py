"""LoRA adapters: a decode step of 64 rows with no adapter, one adapter, and 64 adapters.

    python -m benchmarks.lora --json FILE [--model m] [--rank 8]

The adapters change every projection. The three ways alternate step by step, since other processes share the machine,
and the figures are of the fastest quarter of the steps; the note has the load of the machine meanwhile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Figure, make_parser, report
from benchmarks.random_models import MODELS, make_model
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.config import EngineConfig
from quire.worker.attention import AttentionInputs
from quire.worker.comm.communicator import SingleRank
from quire.worker.lora.layers import PartFactors
from quire.worker.lora.step_adapters import NO_ADAPTERS, make_step_adapters
from quire.worker.rank.runner import ModelRunner

NUM_ROWS, NUM_ADAPTERS, SEQ_LEN, BLOCK_SIZE = 64, 64, 64, 16
WAYS = ("none", "one", "many")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", choices=sorted(MODELS), default="m", help="model of benchmarks.random_models"
    )
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each way")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-lora-") as folder:
        make_model(Path(folder), given.model)
        config = engine_config(folder, given.rank)
        runner = ModelRunner(config, SingleRank())
        runner.allocate_cache(NUM_ROWS * SEQ_LEN // BLOCK_SIZE + 1)
    times = measure(runner, given.rank, given.rounds)
    runner.close()
    note = (
        f"model {given.model}, rank {given.rank}, {NUM_ROWS} rows, {config.model.dtype}, "
        f"{config.parallel.threads_per_rank} threads, load {os.getloadavg()[0]:.1f}"
    )
    figures = {f"step.{way}.ms": Figure(1e3 * times[way], "ms", note) for way in WAYS}
    figures["one_over_none"] = Figure(times["one"] / times["none"], "x", "cost of one adapter on all rows")
    figures["many_over_one"] = Figure(
        times["many"] / times["one"],
        "x",
        f"cost of {NUM_ADAPTERS} adapters, one per row, beside one on all rows",
    )
    report(figures, given.json)


def engine_config(folder: str, rank: int) -> EngineConfig:
    options = EngineOptions(
        folder,
        device="cpu",
        max_num_seqs=NUM_ROWS,
        max_model_len=SEQ_LEN,
        enable_lora=True,
        max_loras=NUM_ADAPTERS,
        max_lora_rank=rank,
    )
    config = resolve(options, Machine.this())
    return replace(config, cache=replace(config.cache, block_size=BLOCK_SIZE))


@torch.inference_mode()
def measure(runner: ModelRunner, rank: int, rounds: int) -> dict[str, float]:
    """Return way |-> seconds of a decode step of all rows, the mean of the fastest quarter."""
    model, adapters = runner.memory.loaded.model, runner.memory.loaded.adapters
    for slot in range(NUM_ADAPTERS):
        for layer in adapters.layers:
            parts = [random_part(part.outputs[1], part.inputs[1], rank) for part in layer.parts]
            layer.put(slot, layer.pack(parts))
    num_blocks = SEQ_LEN // BLOCK_SIZE
    tables = 1 + torch.arange(NUM_ROWS * num_blocks, dtype=torch.int32).view(NUM_ROWS, num_blocks)
    positions = torch.full((NUM_ROWS,), SEQ_LEN - 1, dtype=torch.int64)
    attention = AttentionInputs(
        num_decodes=NUM_ROWS,
        slot_mapping=tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1,
        block_tables=tables,
        query_start=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.full((NUM_ROWS,), SEQ_LEN, dtype=torch.int32),
    )
    tokens = torch.arange(100, 100 + NUM_ROWS, dtype=torch.int32)
    slots = {
        "one": np.zeros(NUM_ROWS, np.int32),
        "many": np.arange(NUM_ROWS, dtype=np.int32) % NUM_ADAPTERS,
    }
    inputs_of = {
        "none": NO_ADAPTERS,
        **{way: make_step_adapters(own, None, torch.device("cpu")) for way, own in slots.items()},
    }
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(rounds + 2):
        for way in WAYS:
            step = inputs_of[way]
            adapters.begin_step(step)
            started = time.perf_counter()
            hidden = model.forward(tokens, positions, runner.memory.kv.cache.layers, attention)
            model.logits(hidden, step.sampled)
            if index >= 2:  # the first steps touch memory for the first time
                times[way].append(time.perf_counter() - started)
    return {way: statistics.mean(sorted(each)[: max(1, rounds // 4)]) for way, each in times.items()}


def random_part(num_outputs: int, num_inputs: int, rank: int) -> PartFactors:
    return PartFactors(
        torch.randn(rank, num_inputs) / num_inputs, torch.randn(rank, num_outputs) / num_outputs
    )


if __name__ == "__main__":
    main()
