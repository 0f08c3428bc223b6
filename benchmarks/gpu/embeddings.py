"""Stage `embeddings`: prompts of the 8B Llama that are pooled into vectors."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.gpu.engine import MODEL, random_prompt, serving
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import matmul_rate, roof

# The first time compiles what is left.
NUM_ROUNDS = 2


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model, dtype = work / MODEL, getattr(torch, sizes.dtype)
    write_llama(model, sizes.model, sizes.dtype, sizes.device)
    matmul = roof(
        folder, "matmul", lambda: matmul_rate(sizes.matmul_len, dtype, sizes.device, sizes.repeat_s)
    )
    with serving(record, model, sizes, "embeddings", runner="pooling") as server:
        for repetition in range(NUM_ROUNDS):
            started = time.perf_counter()
            for index in range(sizes.num_embedded):
                seed = repetition * sizes.num_embedded + index
                server.submit_pooled(random_prompt(sizes, seed, sizes.embedded_len))
            server.drain()
            seconds = time.perf_counter() - started
        assert server.num_vectors == NUM_ROUNDS * sizes.num_embedded, "a prompt has no vector"
        case, rate = f"embeddings.{sizes.embedded_len}", sizes.num_embedded / seconds
        record.add(f"{case}.prompts_per_s", rate, "prompts/s")
        record.add(f"{case}.tokens_per_s", rate * sizes.embedded_len, "tokens/s")
        flops = 2 * (sizes.model.num_parameters - sizes.model.vocab_size * sizes.model.hidden_size)
        share = rate * sizes.embedded_len * flops / matmul
        record.add(f"{case}.share_of_matmul", share, "", "of the projections alone")
