"""Stage `latents`: a DeepSeek of 2.6B random weights with multi-head latent attention."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.gpu.engine import measure_rows, random_prompt, serving
from benchmarks.gpu.random_latent import write_latent_model
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import copy_rate, roof

NUM_PREFILLS = 3


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model, shape = work / "latent", sizes.latent_model
    write_latent_model(model, shape, sizes.dtype, sizes.device)
    copy = roof(folder, "copy", lambda: copy_rate(sizes.copy_bytes, sizes.device, sizes.repeat_s))
    itemsize, prompt_len = getattr(torch, sizes.dtype).itemsize, sizes.prefill_lens[-1]
    with serving(record, model, sizes, "latents") as server:
        for rows, length in (sizes.decodes[0], sizes.decodes[-3], sizes.decodes[-1]):
            case = f"latents.decode.{rows}x{length}"
            if record.begins(case, 8):
                with record.case(case):
                    prompts = [random_prompt(sizes, index, length - sizes.num_timed) for index in range(rows)]
                    handles = [server.submit(prompt, length) for prompt in prompts]
                    step_s = measure_rows(server, handles, sizes.num_timed // 2)
                    server.abort()
                    moved = (shape.num_parameters + rows * length * shape.kv_numbers) * itemsize
                    record.add(f"{case}.step_ms", 1e3 * step_s, "ms")
                    record.add(f"{case}.share_of_copy", moved / step_s / copy, "", "weights and latents once")
        with record.case("latents.prefill"):
            samples = []
            for repetition in range(NUM_PREFILLS):
                prompt = random_prompt(sizes, 2000 + repetition, prompt_len)
                samples.append(server.prefill([server.submit(prompt, 1)]))
                server.drain()
            rate = prompt_len / statistics.median(samples)
            record.add(f"latents.prefill.{prompt_len}.tokens_per_s", rate, "tokens/s")
