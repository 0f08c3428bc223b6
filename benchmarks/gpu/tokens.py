"""Stage `tokens`: greedy tokens of tiny models on the device beside the CPU's and transformers', by each backend."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.libraries import installed_libraries
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.record import Record
from benchmarks.gpu.server import Server
from benchmarks.gpu.sizes import TINY, Sizes

NUM_TOKENS = 12
PROMPT_LENS = (5, 1, 70, 33)
# A model needs about this long, with the compilation of its kernels.
MODEL_S = 15.0
# In float32 the tokens are equal. Of half precision the first ones are, up to near-ties.
EXACT = "float32"
HALF = "bfloat16"
# Share of tokens up to the first difference that half precision keeps at least, of all prompts together.
LEAST_SHARE = 0.5


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    prompts = [np.random.default_rng(length).integers(1, TINY.vocab_size, length) for length in PROMPT_LENS]
    for dtype in (EXACT, HALF):
        with tempfile.TemporaryDirectory() as model:
            write_llama(Path(model), TINY, dtype, "cpu")
            compare_model(record, Path(model), dtype, prompts, sizes)


def compare_model(record: Record, model: Path, dtype: str, prompts: list[Any], sizes: Sizes) -> None:
    """Compare the tokens of one model by transformers, by quire on a CPU, and by each backend on the device."""
    with record.case(f"{dtype}, transformers"):
        expected = _by_transformers(model, prompts)
    others: dict[str, dict[str, Any]] = {
        "cpu": {"device": "cpu"},
        "device": {},
        "launches": {"cuda_graphs": False},
    }
    others |= {name: {"attention_backend": name} for name in installed_libraries(sizes.device)}
    for name, options in others.items():
        case = f"{dtype}, {name}"
        # Libraries compute in half precision.
        if (dtype == EXACT and "attention_backend" in options) or not record.begins(case, MODEL_S):
            continue
        with record.case(case):
            found = _by_quire(model, prompts, {"device": sizes.device, "dtype": dtype, **options})
            share = common_share(found, expected)
            record.add(
                f"tokens.{dtype}.{name}", share, "", "share of transformers' tokens up to the first other one"
            )
            assert share >= (1.0 if dtype == EXACT else LEAST_SHARE), f"{found} differ from {expected}"


def common_share(found: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of the tokens before the first difference of each sequence."""
    common = 0
    for ours, theirs in zip(found, expected, strict=True):
        differ = [index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
        common += differ[0] if differ else len(theirs)
    return common / sum(map(len, expected))


def _by_quire(model: Path, prompts: list[Any], options: dict[str, Any]) -> list[list[int]]:
    server = Server(model, num_kv_blocks=128, max_num_seqs=8, **options)
    try:
        handles = [server.submit(prompt, NUM_TOKENS) for prompt in prompts]
        server.drain()
        return [list(server.tokens[handle]) for handle in handles]
    finally:
        server.close()


@torch.inference_mode()
def _by_transformers(model: Path, prompts: list[Any]) -> list[list[int]]:
    """Return the greedy tokens by the whole context of each, on the CPU."""
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    tokens = []
    for prompt in prompts:
        context = [int(token) for token in prompt]
        for _ in range(NUM_TOKENS):
            context.append(int(hf(torch.tensor([context])).logits[0, -1].argmax()))
        tokens.append(context[len(prompt) :])
    return tokens
