"""Model card of the demo model, measured on the saved files."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.common import Figure
from benchmarks.demo_model.training import (
    BATCH_TOKENS,
    CONTEXT_LEN,
    END,
    LONG_PHASE,
    SEED,
    SHORT_LEN,
    Progress,
    encode_passages,
    next_token_loss,
)
from benchmarks.demo_model.works import HELD_OUT_SHARE, WORKS

SAMPLE_PROMPT = "It was a dark evening, and"
SAMPLE_NUM_TOKENS = 200


@dataclass(frozen=True)
class Measured:
    """Measurements of a saved model, for the model card and the JSON file."""

    num_params: int
    num_steps: int
    num_tokens: int
    train_minutes: float
    train_loss: float
    held_out_loss: float
    bits_per_byte: float

    def figures(self) -> dict[str, Figure]:
        held_out = f"last {HELD_OUT_SHARE:.0%} of every work, context {CONTEXT_LEN}"
        bits_note = "held-out loss over the bytes of the held-out text"
        return {
            "demo_model.num_params": Figure(self.num_params, "parameters", "tied embeddings counted once"),
            "demo_model.num_steps": Figure(self.num_steps, "steps", f"{BATCH_TOKENS} tokens each"),
            "demo_model.num_tokens": Figure(self.num_tokens, "tokens", "trained on, repeats included"),
            "demo_model.train_minutes": Figure(self.train_minutes, "min", "wall time of training alone"),
            "demo_model.train_loss": Figure(self.train_loss, "nats/token", "mean of the last 200 steps"),
            "demo_model.held_out_loss": Figure(self.held_out_loss, "nats/token", held_out),
            "demo_model.bits_per_byte": Figure(self.bits_per_byte, "bits/byte", bits_note),
        }


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


def measure(directory: Path, held_out: list[str], progress: Progress) -> Measured:
    """Measure the model saved in `directory`, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    nats, num_tokens = held_out_nats(model, encode_passages(tokenizer, held_out))
    num_bytes = sum(len(text.encode()) for text in held_out)
    recent = progress.losses[-200:]
    return Measured(
        num_params=sum(p.numel() for p in model.parameters()),
        num_steps=progress.num_steps,
        num_tokens=progress.num_tokens,
        train_minutes=progress.elapsed_s / 60,
        train_loss=sum(recent) / len(recent),
        held_out_loss=nats / num_tokens,
        bits_per_byte=nats / math.log(2) / num_bytes,
    )


def sample(directory: Path) -> str:
    """Return SAMPLE_PROMPT with the saved model's continuation."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(SEED)
    prompt = tokenizer(END + SAMPLE_PROMPT, return_tensors="pt")
    output = model.generate(
        **prompt, do_sample=True, temperature=0.7, top_p=0.95, max_new_tokens=SAMPLE_NUM_TOKENS
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


CARD = """\
---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# The demo model of quire

A Llama-architecture model with {num_params:,} parameters, made for demonstrations and tests: small enough
to lie in a repository and to run on any CPU, real enough that its words are English. It writes in the manner
of its eight books and knows nothing else. It answers no questions and follows no instructions.

| property | value |
| --- | --- |
| layers, hidden size, intermediate size | {layers}, {hidden}, {intermediate} |
| query heads, KV heads, head size | {heads}, {kv_heads}, {head_dim} |
| vocabulary | {vocab}, byte-level BPE, input and output embeddings tied |
| context | {context} tokens |
| stored in | bfloat16 |
| tensor parallelism | 1, 2 or 4 ranks: heads, KV heads, intermediate size and vocabulary divide by 4 |

`{end}` is the only special token: it begins and ends a passage. The tokenizer does not add it by itself;
put it in front of a prompt that is meant as a beginning.

The chat template writes each message as a paragraph, and a reply is the next one.

## A sample

Temperature 0.7, top-p 0.95, seed {seed}, after the prompt "{prompt}":

```text
{sample}
```

## Training

Made by `python -m benchmarks.demo_model` in {train_minutes:.0f} minutes on a CPU: {num_steps:,} steps of
{batch_tokens:,} tokens, {num_tokens:,} in all. Muon for the matrices of the layers, AdamW for the rest,
cosine schedule with warm-up, bfloat16 autocast. Sequences have {short} tokens, and {context} in the last
{long_share:.0%} of the time.

| figure | value |
| --- | --- |
| loss on training text, last 200 steps | {train_loss:.3f} nats per token |
| loss on held-out text | {held_out_loss:.3f} nats per token |
| the same, independent of the tokenizer | {bits_per_byte:.3f} bits per byte |

Held out is the last {held_out_share:.0%} of every work, seen neither by the model nor by the tokenizer.
Measured on the stored weights, computed in float32, context starting anew every {context} tokens.

## The texts

All are in the public domain. Headers, footers and notes of the transcriptions were removed, and of each work
only about the first 90 % is in the file.

| file | work | author | year | origin (GitHub repository, commit) | sha256 (first 16) |
| --- | --- | --- | --- | --- | --- |
{works}
"""


def model_card(config: LlamaConfig, measured: Measured, sample_text: str) -> str:
    works = "\n".join(
        f"| {w.file} | {w.title} | {w.author} | {w.year} | {w.origin} | {w.sha256_prefix} |" for w in WORKS
    )
    return CARD.format(
        **asdict(measured),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        context=CONTEXT_LEN,
        end=END,
        seed=SEED,
        prompt=SAMPLE_PROMPT,
        sample=sample_text,
        batch_tokens=BATCH_TOKENS,
        short=SHORT_LEN,
        long_share=1 - LONG_PHASE,
        held_out_share=HELD_OUT_SHARE,
        works=works,
    )
