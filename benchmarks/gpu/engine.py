"""Stage `engine`: an 8B Llama of random weights from load to close, with graphs and without."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device_time import DeviceTime, profile_device
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.record import Record
from benchmarks.gpu.server import GREEDY, Server
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import copy_rate, matmul_rate, roof
from quire.kernels.dispatch import num_compilations

# Steps before a measurement, in which rows settle and graphs are recorded if they are not yet.
NUM_WARM_UP = 6
NUM_PROFILED = 8
# Name of the model in the work folder.
MODEL = "llama-8b"
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.9)


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model = work / MODEL
    with record.case("write model"):
        record.add("engine.weights", write_llama(model, sizes.model, sizes.dtype, sizes.device), "bytes")
    first = serving(record, model, sizes, "graphs", compiles_ahead=True)
    with record.case("graphs"), first as server:
        measure_memory(record, server, sizes)
        measure_decodes(record, server, folder, sizes, "graphs", sizes.decodes)
        if record.begins("prefill", 10):
            with record.case("prefill"):
                measure_prefills(record, server, folder, sizes)
        if record.begins("mixed load", sizes.mixed_s + 5):
            with record.case("mixed load"):
                measure_mixed(record, server, sizes)
        with record.case("peak"):
            measure_peak(record, server, sizes)
    # The second engine of this process also shows that the first one has freed its memory.
    some = (sizes.decodes[0], sizes.decodes[-3])
    if record.begins("eager", 20):
        with record.case("eager"), serving(record, model, sizes, "eager", cuda_graphs=False) as server:
            measure_decodes(record, server, folder, sizes, "eager", some)


@contextlib.contextmanager
def serving(record: Record, model: Path, sizes: Sizes, name: str, **options: Any) -> Iterator[Server]:
    """Load an engine, record how long it takes, and close it after the body."""
    options = {"device": sizes.device, "dtype": sizes.dtype, **sizes.options, **options}
    server = Server(model, **options)
    try:
        record.add(f"engine.{name}.start_s", server.load_s, "s", "weights, profile, graphs and KV cache")
        cache = server.config.cache
        assert cache.num_kv_blocks is not None
        record.add(f"engine.{name}.kv_tokens", (cache.num_kv_blocks - 1) * cache.block_size, "tokens")
        yield server
    finally:
        server.close()
        if sizes.device == "cuda":
            left = torch.cuda.memory_allocated()
            record.add(f"engine.{name}.left_bytes", left, "bytes", "allocated after close")


def measure_memory(record: Record, server: Server, sizes: Sizes) -> None:
    weights = record.figures["gpu.engine.weights"].value
    for stage, seconds in server.group.load_seconds.items():
        record.add(f"engine.load.{stage}_s", seconds, "s")
    rate = weights / server.group.load_seconds["weights"]
    record.add("engine.load.rate", rate, "bytes/s", "files in the page cache")
    record.add("engine.compilations_at_start", num_compilations(), "")


def measure_peak(record: Record, server: Server, sizes: Sizes) -> None:
    """Record by how much the memory in use exceeded the share that was asked for."""
    if sizes.device != "cuda":
        return
    total = torch.cuda.get_device_properties(0).total_memory
    budget = total * server.config.cache.gpu_memory_utilization
    free, _ = torch.cuda.mem_get_info()
    record.add("engine.memory.peak", torch.cuda.max_memory_allocated(), "bytes", "allocated by tensors")
    record.add("engine.memory.in_use", total - free, "bytes", "as the driver reports it")
    record.add("engine.memory.over_budget", total - free - budget, "bytes")


def measure_decodes(
    record: Record, server: Server, folder: Path, sizes: Sizes, name: str, shapes: tuple[tuple[int, int], ...]
) -> None:
    copy = roof(folder, "copy", lambda: copy_rate(sizes.copy_bytes, sizes.device, sizes.repeat_s))
    for rows, length in shapes:
        case = f"decode.{rows}x{length}.{name}"
        if record.begins(case, 10):
            with record.case(case):
                measure_decode(record, server, sizes, copy, case, rows, length)
    if name == "graphs":
        rows, length = shapes[-3]
        if record.begins("sampling", 10):
            with record.case("sampling"):
                measure_decode(
                    record, server, sizes, copy, f"decode.{rows}x{length}.top_p", rows, length, SAMPLED
                )


def measure_decode(
    record: Record, server: Server, sizes: Sizes, copy: float, case: str, rows: int, length: int,
    sampling: Any = GREEDY,
) -> None:  # fmt: skip
    """Measure the steps of `rows` sequences of `length` tokens; prompts repeat, so their prefix is found cached."""
    start_len = length - NUM_WARM_UP - sizes.num_timed // 2
    handles = [
        server.submit(random_prompt(sizes, index, start_len), length, sampling) for index in range(rows)
    ]
    seconds = server.prefill(handles)
    record.add(f"engine.{case}.prefill_s", seconds, "s", "all prompts, unless cached")
    server.run(NUM_WARM_UP)
    before = num_compilations()
    steps = server.run(sizes.num_timed)
    step_s = statistics.median(steps)
    itemsize = getattr(torch, sizes.dtype).itemsize
    moved = (sizes.model.num_parameters + rows * length * sizes.model.kv_numbers) * itemsize
    record.add(f"engine.{case}.step_ms", 1e3 * step_s, "ms")
    record.add(f"engine.{case}.tokens_per_s", rows / step_s, "tokens/s")
    record.add(f"engine.{case}.share_of_copy", moved / step_s / copy, "", "weights and KV once")
    record.add(f"engine.{case}.p99_ms", 1e3 * float(np.quantile(steps, 0.99)), "ms")
    record.add(f"engine.{case}.compilations", num_compilations() - before, "")
    found = profile_device(lambda: server.run(NUM_PROFILED), NUM_PROFILED, sizes.device)
    if found is not None:
        _add_device_time(record, case, found)
    server.abort()


def measure_rows(server: Server, handles: list[int], num_steps: int) -> float:
    """Return the median seconds of a step of these requests, once all of them decode."""
    server.prefill(handles)
    server.run(NUM_WARM_UP)
    return statistics.median(server.run(num_steps))


def _add_device_time(record: Record, case: str, found: DeviceTime) -> None:
    record.add(f"engine.{case}.host_gap_us", 1e6 * found.gap_s, "us", "device idle per step, profiled")
    record.add(f"engine.{case}.busy_ms", 1e3 * found.busy_s, "ms", "device busy per step, profiled")
    record.note(f"kernels of {case}", found.kernels)


def measure_prefills(record: Record, server: Server, folder: Path, sizes: Sizes) -> None:
    dtype, model = getattr(torch, sizes.dtype), sizes.model
    matmul = roof(
        folder, "matmul", lambda: matmul_rate(sizes.matmul_len, dtype, sizes.device, sizes.repeat_s)
    )
    for length in sizes.prefill_lens:
        samples = []
        for repetition in range(4):
            prompt = random_prompt(sizes, 1000 + 10 * length + repetition, length)
            samples.append(server.prefill([server.submit(prompt, 1)]))
            server.drain()
        seconds = statistics.median(samples[1:])
        attention = 2 * model.num_hidden_layers * length**2 * model.num_attention_heads * model.head_dim
        flops = 2 * model.num_parameters * length + attention
        record.add(f"engine.prefill.{length}.ms", 1e3 * seconds, "ms")
        record.add(f"engine.prefill.{length}.tokens_per_s", length / seconds, "tokens/s")
        record.add(f"engine.prefill.{length}.share_of_matmul", flops / seconds / matmul, "")


def measure_mixed(record: Record, server: Server, sizes: Sizes) -> None:
    """Keep `mixed_rows` requests of random lengths and sampling settings running, and time each step."""
    rng = np.random.default_rng(1)
    before, num_tokens = num_compilations(), sum(map(len, server.tokens.values()))
    steps: list[float] = []
    while sum(steps) < sizes.mixed_s:
        while len(server.running) < sizes.mixed_rows:
            prompt_len = int(rng.integers(1, sizes.mixed_prompt_len))
            prompt = random_prompt(sizes, int(rng.integers(1 << 30)), prompt_len)
            server.submit(prompt, int(rng.integers(1, sizes.mixed_output_len)), _random_sampling(rng))
        steps.append(server.step())
    num_tokens = sum(map(len, server.tokens.values())) - num_tokens
    record.add("engine.mixed.compilations", num_compilations() - before, "", "after ready: goal 0")
    record.add("engine.mixed.tokens_per_s", num_tokens / sum(steps), "tokens/s", f"{sizes.mixed_rows} rows")
    for quantile in (0.5, 0.99, 1.0):
        name = "max" if quantile == 1 else f"p{100 * quantile:.0f}"
        record.add(f"engine.mixed.step_{name}_ms", 1e3 * float(np.quantile(steps, quantile)), "ms")
    server.abort()


def _random_sampling(rng: np.random.Generator) -> Any:
    kinds = [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=int(rng.integers(1000))),
        replace(GREEDY, temperature=0.8, top_k=50, top_p=0.9),
        replace(GREEDY, temperature=0.7, repetition_penalty=1.1),
        replace(GREEDY, logprobs=int(rng.integers(1, 5))),
    ]
    return kinds[int(rng.integers(len(kinds)))]


def random_prompt(sizes: Sizes, seed: int, length: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(1, sizes.model.vocab_size, length)
