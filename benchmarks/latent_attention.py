"""Multi-head latent attention on a CPU, in its two ways, with the sizes of DeepSeek-V2-Lite.

    python -m benchmarks.latent_attention [--quick] --json benchmarks/results/latent_attention.json

- latent.decode.<heads>_heads.<tokens>: ms per layer of one decoding sequence; 8 of the 16 heads are the part of one
  of two ranks that both hold all latents.
- latent.prefill.<way>.<tokens>: ms per layer of a chunk of 512 tokens that ends a sequence, with keys and values
  expanded from the latents, or with queries that attend to the latents (absorbed).
- latent.kv_bytes.<model>: bytes of a token on each rank in bfloat16, and of keys and values of all heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common import Figure, make_parser, median, report
from quire.kernels.latent_attention import ChunkBounds, latent_decode_attention, latent_prefill_attention

RANK, SHARED_DIM, KEY_DIM, VALUE_DIM, NUM_HEADS = 512, 64, 128, 128, 16
BLOCK_SIZE, CHUNK_LEN, SCALE = 16, 512, 192**-0.5
# model |-> layers, heads
MODELS = {"deepseek_v2_lite": (27, 16), "deepseek_v3": (61, 128)}


def milliseconds(call: Callable[[], object], repetitions: int) -> float:
    """Return the median time of a call after one that does not count."""
    call()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def measure(num_tokens: int, repetitions: int) -> dict[str, Figure]:
    """Return the times for one sequence of `num_tokens`."""
    num_blocks = num_tokens // BLOCK_SIZE + 1
    latents = torch.randn(num_blocks, 1, 1, BLOCK_SIZE, RANK + SHARED_DIM).bfloat16()
    table = torch.arange(1, num_blocks, dtype=torch.int32)[None]
    length = torch.tensor([num_tokens], dtype=torch.int32)
    figures = {}
    for heads in (NUM_HEADS, NUM_HEADS // 2):
        q = torch.randn(1, heads, RANK + SHARED_DIM).bfloat16()
        decode = partial(latent_decode_attention, q, latents, table, length, SCALE, RANK)
        ms = milliseconds(decode, repetitions)
        figures[f"latent.decode.{heads}_heads.{num_tokens}"] = Figure(ms, "ms")
    q = torch.randn(CHUNK_LEN, NUM_HEADS, KEY_DIM + SHARED_DIM).bfloat16()
    absorbed = torch.randn(CHUNK_LEN, NUM_HEADS, RANK + SHARED_DIM).bfloat16()
    expansion = torch.randn(NUM_HEADS, KEY_DIM + VALUE_DIM, RANK).bfloat16() * RANK**-0.5
    starts = torch.tensor([0, CHUNK_LEN], dtype=torch.int32)
    bounds = ChunkBounds([CHUNK_LEN], [num_tokens])
    lens = torch.arange(num_tokens - CHUNK_LEN + 1, num_tokens + 1, dtype=torch.int32)
    tables = table.repeat(CHUNK_LEN, 1)
    ways = {
        "expanded": lambda: latent_prefill_attention(
            q, latents, table, starts, length, bounds, SCALE, expansion
        ),
        "absorbed": lambda: latent_decode_attention(absorbed, latents, tables, lens, SCALE, RANK),
    }
    for way, call in ways.items():
        ms = milliseconds(call, max(1, repetitions // 4))
        figures[f"latent.prefill.{way}.{num_tokens}"] = Figure(ms, "ms", f"{CHUNK_LEN} tokens")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repetitions")
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for num_tokens in (CHUNK_LEN,) if arguments.quick else (CHUNK_LEN, 8 * CHUNK_LEN):
        figures |= measure(num_tokens, 2 if arguments.quick else 12)
    for model, (num_layers, num_heads) in MODELS.items():
        expanded = 2 * num_layers * num_heads * (KEY_DIM + SHARED_DIM + VALUE_DIM)
        note = f"keys and values of all heads: {expanded:,} bytes"
        figures[f"latent.kv_bytes.{model}"] = Figure(2 * num_layers * (RANK + SHARED_DIM), "bytes", note)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
