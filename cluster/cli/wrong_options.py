"""Hints for options that quire does not have: names that other engines use for one of its own."""

from __future__ import annotations

from collections.abc import Mapping

# Option of SGLang, llama.cpp, TGI or a usual abbreviation |-> quire's.
_OTHER_NAMES: Mapping[str, str] = {
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size",
    "--model-path": "MODEL, the first argument",
    "--model-id": "MODEL, the first argument",
    "--model": "MODEL, the first argument",
    "-m": "MODEL, the first argument",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--max-total-tokens": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--disable-radix-cache": "--no-prefix-caching",
    "--schedule-policy": "--policy",
    "--quantize": "--quantization",
    "--random-seed": "--seed",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--temp": "--temperature",
    "--url": "--target",
    "--address": "--target, or for `quire serve` the address of a Ray cluster",
}


def other_name_hint(option: str) -> str:
    """Return the words that name quire's option of another engine's name; empty if there is none."""
    name = _OTHER_NAMES.get(option)
    return "" if name is None else f"; did you mean {name}?"
