"""Train the bundled demo model: a small Llama with grouped-query attention, on public-domain English.

    python -m benchmarks.demo_model --text DIR --out cluster/demo/model [--minutes 30] [--json FILE]

DIR is a directory with the files named in the table WORKS; each is checked against its sha256 before use.
The outcome is an ordinary Hugging Face directory: weights in bfloat16, byte-level BPE tokenizer, model card.

The budget is time: the learning rate follows the clock, so that a slower machine trains less but still
ends well. The state of training is saved every two minutes, and the same command resumes from it.
"""

import argparse
import json
import math
import os
import platform
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 1859
END = "<|endoftext|>"  # begins, ends and separates passages
VOCAB_SIZE = 3072
CONTEXT_LEN = 1024
HELD_OUT_SHARE = 0.05  # the end of every work
MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 400, 12_000  # a few paragraphs to a chapter
BATCH_TOKENS = 2048
LONG_PHASE = 0.7  # from this share of the time on, sequences are CONTEXT_LEN tokens long
SHORT_LEN = 256
PEAK_LEARNING_RATE, WARM_UP = 3e-3, 0.02
SAVE_EVERY_S = 120.0
SAMPLE_PROMPT = "It was a dark evening, and"
SAMPLE_NUM_TOKENS = 200


@dataclass(frozen=True)
class Work:
    """One public-domain text, where its transcription came from, and what its bytes must hash to."""

    file: str
    title: str
    author: str
    year: str
    origin: str  # GitHub repository and commit
    sha256_prefix: str


WORKS = (
    Work("tinyshakespeare.txt", "part of the plays", "William Shakespeare (d. 1616)", "1589-1613",
         "karpathy/char-rnn 6f9487a", "016ab9b6705d6b68"),
    Work("austen_pride_and_prejudice.txt", "Pride and Prejudice", "Jane Austen (d. 1817)", "1813",
         "GITenberg/Pride-and-Prejudice_1342 81db45c", "a5d5040c7cf4f9b2"),
    Work("doyle_adventures_of_sherlock_holmes.txt", "The Adventures of Sherlock Holmes",
         "Arthur Conan Doyle (d. 1930)", "1892",
         "GITenberg/The-Adventures-of-Sherlock-Holmes_1661 7e5dd27", "5fc1221808710ad7"),
    Work("melville_moby_dick.txt", "Moby-Dick", "Herman Melville (d. 1891)", "1851",
         "GITenberg/Moby-Dick--Or-The-Whale_2701 bdf1948", "7e5bfda55a613f7f"),
    Work("shelley_frankenstein.txt", "Frankenstein", "Mary Shelley (d. 1851)", "1818, 1831",
         "GITenberg/Frankenstein_84 c98a483", "cc7aec8361a13e66"),
    Work("dickens_tale_of_two_cities.txt", "A Tale of Two Cities", "Charles Dickens (d. 1870)", "1859",
         "GITenberg/A-Tale-of-Two-Cities_98 0f6111b", "e70d7e7d96a111c6"),
    Work("dickens_great_expectations.txt", "Great Expectations", "Charles Dickens (d. 1870)", "1861",
         "GITenberg/Great-Expectations_1400 889db0e", "984955a7f7b94902"),
    Work("tolstoy_war_and_peace.txt", "War and Peace",
         "Leo Tolstoy (d. 1910), English by Louise and Aylmer Maude (d. 1939, 1938)", "1869, English 1923",
         "GITenberg/War-and-Peace_2600 fa22ab9", "c7f766d88cb0fd66"),
)  # fmt: skip


# Text


def read_works(directory: Path) -> list[str]:
    """The texts of WORKS, in that order; refuses a file that is not the one the table names."""
    texts = []
    for work in WORKS:
        content = (directory / work.file).read_bytes()
        digest = sha256(content).hexdigest()
        if not digest.startswith(work.sha256_prefix):
            raise ValueError(f"{work.file}: sha256 is {digest[:16]}, the table says {work.sha256_prefix}")
        texts.append(content.decode())
    return texts


def split_held_out(text: str) -> tuple[str, str]:
    """Cut at the first paragraph end in the last HELD_OUT_SHARE of the text."""
    cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT_SHARE)))
    return text[:cut], text[cut:].strip()


def split_passages(text: str, rng: random.Random) -> list[str]:
    """Whole paragraphs in passages of random length, evenly spread on a logarithmic scale."""
    passages: list[str] = []
    current, wanted_chars = "", 0.0
    for paragraph in re.split(r"\n{2,}", text.strip()):
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if not wanted_chars:
            wanted_chars = math.exp(rng.uniform(math.log(MIN_PASSAGE_CHARS), math.log(MAX_PASSAGE_CHARS)))
        if len(current) >= wanted_chars:
            passages.append(current)
            current, wanted_chars = "", 0.0
    return [*passages, current] if current else passages


# Tokenizer


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are in the alphabet, so that every text has a round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )


def encode_passages(tokenizer: PreTrainedTokenizerFast, passages: list[str]) -> list[list[int]]:
    """Token ids of each passage, END in front."""
    end_id = tokenizer.convert_tokens_to_ids(END)
    return [[end_id, *ids] for ids in tokenizer(passages, verbose=False)["input_ids"]]


def batches(passages: list[list[int]], seq_len: int, rng: random.Random) -> Iterator[Tensor]:
    """Forever `[B, seq_len + 1]`: the passages of each epoch are shuffled, joined and cut into rows."""
    batch_size = BATCH_TOKENS // seq_len
    while True:
        rng.shuffle(passages)
        stream = torch.tensor([token for passage in passages for token in passage])
        rows = stream.unfold(0, seq_len + 1, seq_len)
        order = torch.tensor(rng.sample(range(len(rows)), len(rows)))
        yield from torch.split(rows[order], batch_size)


# Training


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Heads, KV heads, the intermediate size and the vocabulary all divide by 4, for tensor parallelism."""
    end_id = tokenizer.convert_tokens_to_ids(END)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LEN,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,  # no pad_token_id: it would keep gradients from the embedding of END
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def new_optimizers(model: LlamaForCausalLM) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms.

    After 90 s on two cores, at a peak rate of 4e-3: 4.71 nats a held-out token so, 5.28 with AdamW for all.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine down to nothing; `progress` is the share of the time that is spent."""
    if progress < WARM_UP:
        return PEAK_LEARNING_RATE * progress / WARM_UP
    spent = min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * spent))


def next_token_loss(model: LlamaForCausalLM, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of every token of `rows` but the first of each row."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


@dataclass
class Progress:
    """What has been spent on training so far."""

    elapsed_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    losses: list[float] = field(default_factory=list)  # one a step


def save_state(path: Path, progress: Progress, parts: list[Any]) -> None:
    """Write `progress` and the state of the model and its optimizers, all at once."""
    state = {"progress": asdict(progress), "parts": [part.state_dict() for part in parts]}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_state(path: Path, parts: list[Any]) -> Progress:
    """Resume from `path`, or start from nothing where there is no such file."""
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    for part, part_state in zip(parts, state["parts"], strict=True):
        part.load_state_dict(part_state)
    return Progress(**state["progress"])


def train(model: LlamaForCausalLM, passages: list[list[int]], minutes: float, checkpoint: Path) -> Progress:
    """Train until `minutes` are spent, earlier runs that left a checkpoint included."""
    optimizers = new_optimizers(model)
    progress = load_state(checkpoint, [model, *optimizers])
    rng = random.Random(SEED + progress.num_steps)
    short, long = batches(passages, SHORT_LEN, rng), batches(passages, CONTEXT_LEN, rng)
    last = last_saved = time.monotonic()
    model.train()
    while (share := progress.elapsed_s / (60 * minutes)) < 1:
        rows = next(short if share < LONG_PHASE else long)
        progress.losses.append(train_step(model, optimizers, rows, learning_rate(share)))
        progress.num_steps += 1
        progress.num_tokens += rows[:, 1:].numel()
        now = time.monotonic()
        progress.elapsed_s, last = progress.elapsed_s + now - last, now
        if progress.num_steps % 50 == 0:
            mean = sum(progress.losses[-50:]) / 50
            print(f"step {progress.num_steps}  {progress.elapsed_s:.0f} s  loss {mean:.3f}", flush=True)
        if now - last_saved > SAVE_EVERY_S:
            save_state(checkpoint, progress, [model, *optimizers])
            last_saved = now
    save_state(checkpoint, progress, [model, *optimizers])
    return progress


def train_step(model: LlamaForCausalLM, optimizers: list[Optimizer], rows: Tensor, rate: float) -> float:
    """One update of the weights; returns the loss before it."""
    # Two cores with avx512_bf16: 4,900 tokens/s in bfloat16 autocast, 3,500 in float32, both with SDPA.
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(model, rows)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# The finished model


@dataclass(frozen=True)
class Figures:
    """What the model card and the JSON file state about a saved model."""

    num_params: int
    num_steps: int
    num_tokens: int
    train_minutes: float
    train_loss: float
    held_out_loss: float
    bits_per_byte: float


@torch.inference_mode()
def held_out_nats(model: LlamaForCausalLM, works: list[list[int]]) -> tuple[float, int]:
    """Sum of the loss over every token but each work's first, and their number; context starts anew
    every CONTEXT_LEN tokens."""
    nats, num_tokens = 0.0, 0
    for ids in works:
        for start in range(0, len(ids) - 1, CONTEXT_LEN):
            rows = torch.tensor([ids[start : start + CONTEXT_LEN + 1]])
            nats += next_token_loss(model, rows, reduction="sum").item()
            num_tokens += rows.shape[1] - 1
    return nats, num_tokens


def measure(directory: Path, held_out: list[str], progress: Progress) -> Figures:
    """Figures of the model as it was written to `directory`, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    nats, num_tokens = held_out_nats(model, encode_passages(tokenizer, held_out))
    num_bytes = sum(len(text.encode()) for text in held_out)
    recent = progress.losses[-200:]
    return Figures(
        num_params=sum(p.numel() for p in model.parameters()),
        num_steps=progress.num_steps,
        num_tokens=progress.num_tokens,
        train_minutes=progress.elapsed_s / 60,
        train_loss=sum(recent) / len(recent),
        held_out_loss=nats / num_tokens,
        bits_per_byte=nats / math.log(2) / num_bytes,
    )


def sample(directory: Path) -> str:
    """SAMPLE_PROMPT and what the saved model makes of it."""
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
| loss on training text, last 200 steps | {train_loss:.3f} nats a token |
| loss on held-out text | {held_out_loss:.3f} nats a token |
| the same, independent of the tokenizer | {bits_per_byte:.3f} bits a byte |

Held out is the last {held_out_share:.0%} of every work, seen neither by the model nor by the tokenizer.
Measured on the stored weights, computed in float32, context starting anew every {context} tokens.

## The texts

All are in the public domain. Headers, footers and notes of the transcriptions were removed, and of each work
only about the first 90 % is in the file.

| file | work | author | year | origin (GitHub repository, commit) | sha256 (first 16) |
| --- | --- | --- | --- | --- | --- |
{works}
"""


def model_card(config: LlamaConfig, figures: Figures, sample_text: str) -> str:
    works = "\n".join(
        f"| {w.file} | {w.title} | {w.author} | {w.year} | {w.origin} | {w.sha256_prefix} |" for w in WORKS
    )
    return CARD.format(
        **asdict(figures),
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


def save_model(directory: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Weights in bfloat16, configuration and tokenizer, as transformers writes them."""
    model.to(torch.bfloat16).save_pretrained(directory)
    end_id = tokenizer.convert_tokens_to_ids(END)
    GenerationConfig(bos_token_id=end_id, eos_token_id=end_id, pad_token_id=end_id).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def publish(staging: Path, out: Path) -> None:
    """Move each file over its older version, so that a reader never sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(staging.iterdir()):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        path.replace(out / path.name)


def write_figures(path: Path, figures: Figures) -> None:
    notes = {
        "num_params": ("parameters", "tied embeddings counted once"),
        "num_steps": ("steps", f"{BATCH_TOKENS} tokens each"),
        "num_tokens": ("tokens", "trained on, repeats included"),
        "train_minutes": ("min", "wall time of training alone"),
        "train_loss": ("nats/token", "mean of the last 200 steps"),
        "held_out_loss": ("nats/token", f"last {HELD_OUT_SHARE:.0%} of every work, context {CONTEXT_LEN}"),
        "bits_per_byte": ("bits/byte", "held-out loss over the bytes of the held-out text"),
    }
    values = asdict(figures)
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.demo_model", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "figures": {
            f"demo_model.{name}": {"value": values[name], "unit": unit, "note": note}
            for name, (unit, note) in notes.items()
        },
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="directory with the files of WORKS")
    parser.add_argument("--out", type=Path, required=True, help="where the model goes")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall time of training (default 30)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir(), "quire_demo_model.pt"),
                        help="state of training, resumed from where it exists")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    texts, held_out = zip(*map(split_held_out, read_works(arguments.text)), strict=True)
    tokenizer = train_tokenizer(list(texts))
    passages = [passage for text in texts for passage in split_passages(text, rng)]
    model = new_model(tokenizer)
    progress = train(model, encode_passages(tokenizer, passages), arguments.minutes, arguments.checkpoint)

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as name:
        staging = Path(name)
        save_model(staging, model, tokenizer)
        figures = measure(staging, list(held_out), progress)
        card = model_card(model.config, figures, sample(staging))
        (staging / "README.md").write_text(card)
        publish(staging, arguments.out)
    arguments.checkpoint.unlink()
    if arguments.json:
        write_figures(arguments.json, figures)
    print(figures)


if __name__ == "__main__":
    main()
