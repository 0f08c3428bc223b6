"""Stage `reference`: quire beside transformers on the same weights, for exactness and for speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import MODEL, random_prompt, serving
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes

NUM_TOKENS = 32
# Rows and tokens of the comparison of tokens.
NUM_COMPARED, COMPARED_LEN = 4, 128
# Dry runs have a context of 256.
MAX_PROMPT_SHARE = 4


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model = work / MODEL
    write_llama(model, sizes.model, sizes.dtype, sizes.device)
    length = min(COMPARED_LEN, sizes.model.max_position_embeddings // MAX_PROMPT_SHARE)
    prompts = [random_prompt(sizes, 50 + index, length) for index in range(NUM_COMPARED)]
    if record.begins("quire", 20):
        with record.case("quire"), serving(record, model, sizes, "reference") as server:
            handles = [server.submit(prompt, NUM_TOKENS) for prompt in prompts]
            server.drain()
            tokens = [server.tokens[handle] for handle in handles]
    if record.begins("transformers", 20):
        with record.case("transformers"), torch.inference_mode():
            hf = _load(model, sizes)
            with record.case("exactness"):
                _compare(record, hf, prompts, tokens, sizes)
            for rows, length in (sizes.decodes[0], sizes.decodes[-3]):
                if record.begins(f"speed of {rows} rows", 10):
                    with record.case(f"speed of {rows} rows"):
                        _measure_speed(record, hf, rows, length, sizes)


def _load(model: Path, sizes: Sizes) -> Any:
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, sizes.dtype))
    return hf.to(sizes.device).eval()


def _compare(record: Record, hf: Any, prompts: list[Any], tokens: list[list[int]], sizes: Sizes) -> None:
    """Count quire's tokens that are transformers' choice, or as likely within the rounding of bfloat16 logits."""
    num_equal = num_near = num_all = 0
    for prompt, own in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *own]], device=sizes.device)
        logits = hf(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(own, device=sizes.device).view(-1, 1)).squeeze(1)
        best = logits.max(dim=1).values
        num_equal += int((chosen == best).sum())
        num_near += int((chosen >= best - 0.02 * best.abs().clamp(min=1)).sum())
        num_all += len(own)
    record.add("reference.equal_tokens", num_equal / num_all, "", "share that is transformers' greedy choice")
    record.add("reference.near_tokens", num_near / num_all, "", "share within 2 % of the largest logit")
    assert num_near == num_all, f"{num_all - num_near} of {num_all} tokens are not near transformers' choice"


def _measure_speed(record: Record, hf: Any, rows: int, length: int, sizes: Sizes) -> None:
    ids = torch.stack([torch.from_numpy(random_prompt(sizes, index, length)) for index in range(rows)])
    ids = ids.to(sizes.device)
    seconds = []
    for num_tokens in (2, 2, 2 + NUM_TOKENS):  # the first call warms up
        started = time.perf_counter()
        hf.generate(
            ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        if sizes.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    step_s = (seconds[2] - seconds[1]) / NUM_TOKENS
    record.add(
        f"reference.transformers.{rows}x{length}.step_ms", 1e3 * step_s, "ms", "eager, its default attention"
    )
