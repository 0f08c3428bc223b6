"""Measurements of the demo model, on the saved files."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.common import Figure
from benchmarks.demo_model.training import (
    BATCH_TOKENS,
    CONTEXT_LEN,
    Progress,
    encode_passages,
    next_token_loss,
)
from benchmarks.demo_model.works import HELD_OUT_SHARE


@torch.inference_mode()
def held_out_nats(model: LlamaForCausalLM, works: list[list[int]]) -> tuple[float, int]:
    """Return the summed loss over every token except each work's first, and their number.

    The context restarts every CONTEXT_LEN tokens.
    """
    nats, num_tokens = 0.0, 0
    for ids in works:
        for start in range(0, len(ids) - 1, CONTEXT_LEN):
            rows = torch.tensor([ids[start : start + CONTEXT_LEN + 1]])
            nats += next_token_loss(model, rows, reduction="sum").item()
            num_tokens += rows.shape[1] - 1
    return nats, num_tokens


def measure(directory: Path, held_out: list[str], progress: Progress) -> dict[str, Figure]:
    """Measure the model saved in `directory`, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    nats, num_tokens = held_out_nats(model, encode_passages(tokenizer, held_out))
    num_bytes = sum(len(text.encode()) for text in held_out)
    recent, minutes = progress.losses[-200:], progress.elapsed_s / 60
    figures = {
        "num_params": Figure(
            sum(p.numel() for p in model.parameters()), "parameters", "tied embeddings counted once"
        ),
        "num_steps": Figure(progress.num_steps, "steps", f"{BATCH_TOKENS} tokens each"),
        "num_tokens": Figure(progress.num_tokens, "tokens", "trained on, repeats included"),
        "train_minutes": Figure(minutes, "min", "wall time of training alone"),
        "train_loss": Figure(sum(recent) / len(recent), "nats/token", "mean of the last 200 steps"),
        "held_out_loss": Figure(
            nats / num_tokens, "nats/token", f"last {HELD_OUT_SHARE:.0%} of every work, context {CONTEXT_LEN}"
        ),
        "bits_per_byte": Figure(
            nats / math.log(2) / num_bytes, "bits/byte", "held-out loss over the bytes of the held-out text"
        ),
    }
    return {f"demo_model.{name}": figure for name, figure in figures.items()}
