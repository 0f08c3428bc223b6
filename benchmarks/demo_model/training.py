"""Training of the demo model and its tokenizer."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_model.works import read_works, split_held_out, split_passages

SEED = 1859
END = "<|endoftext|>"  # begins, ends and separates passages
VOCAB_SIZE = 3072
CONTEXT_LEN = 1024
BATCH_TOKENS = 2048
LONG_PHASE = 0.7  # from this share of the time on, sequences are CONTEXT_LEN tokens long
SHORT_LEN = 256
PEAK_LEARNING_RATE, WARM_UP = 3e-3, 0.02
SAVE_EVERY_S = 120.0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; all 256 bytes are in its alphabet, so every text round-trips."""
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
    """Return the token ids of each passage, with END in front."""
    end_id = tokenizer.convert_tokens_to_ids(END)
    return [[end_id, *ids] for ids in tokenizer(passages, verbose=False)["input_ids"]]


def encode_works(
    tokenizer: PreTrainedTokenizerFast, folder: Path, rng: random.Random
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the passages of WORKS, of which `folder` has the files: for training, and held out.

    Raises:
        ValueError: as from `read_works`.
    """
    texts, held_out = zip(*map(split_held_out, read_works(folder)), strict=True)
    passages = encode_passages(tokenizer, [part for text in texts for part in split_passages(text, rng)])
    return passages, encode_passages(
        tokenizer, [part for text in held_out for part in split_passages(text, rng)]
    )


def batches(passages: list[list[int]], seq_len: int, rng: random.Random) -> Iterator[Tensor]:
    """Yield batches [B, seq_len + 1] forever: each epoch shuffles the passages, joins them and cuts rows."""
    batch_size = BATCH_TOKENS // seq_len
    while True:
        rng.shuffle(passages)
        stream = torch.tensor([token for passage in passages for token in passage])
        rows = stream.unfold(0, seq_len + 1, seq_len)
        order = torch.tensor(rng.sample(range(len(rows)), len(rows)))
        yield from torch.split(rows[order], batch_size)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model whose heads, KV heads, intermediate size and vocabulary are divisible by 4.

    That allows tensor parallelism of up to 4 ranks.
    """
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
    """Return Muon for the matrices of the layers and AdamW for embeddings and norms.

    After 90 s on two cores at a peak rate of 4e-3: 4.71 nats per held-out token, 5.28 with AdamW alone.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float, peak: float = PEAK_LEARNING_RATE, warm_up: float = WARM_UP) -> float:
    """Return the learning rate: linear warm-up, then a cosine to zero; `progress` is the elapsed share of time."""
    if progress < warm_up:
        return peak * progress / warm_up
    spent = min(1.0, (progress - warm_up) / (1 - warm_up))
    return peak * 0.5 * (1 + math.cos(math.pi * spent))


def timed_steps(minutes: float) -> Iterator[tuple[int, float]]:
    """Yield the number of each step, from 1, and the elapsed share of the time, until `minutes` have passed."""
    started = time.monotonic()
    for number in itertools.count(1):
        share = (time.monotonic() - started) / (60 * minutes)
        if share >= 1:
            return
        yield number, share


def next_token_loss(model: LlamaForCausalLM, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats over every token of `rows` except the first of each row."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


@dataclass
class Progress:
    """Training so far."""

    elapsed_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    losses: list[float] = field(default_factory=list)  # one per step


def save_state(path: Path, progress: Progress, parts: list[Any]) -> None:
    """Write `progress` and the state of the model and its optimizers atomically."""
    state = {"progress": asdict(progress), "parts": [part.state_dict() for part in parts]}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_state(path: Path, parts: list[Any]) -> Progress:
    """Load the state from `path`; return a fresh Progress if the file does not exist."""
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    for part, part_state in zip(parts, state["parts"], strict=True):
        part.load_state_dict(part_state)
    return Progress(**state["progress"])


def train(model: LlamaForCausalLM, passages: list[list[int]], minutes: float, checkpoint: Path) -> Progress:
    """Train until `minutes` have passed in total, including earlier runs that left the checkpoint."""

    def work(progress: Progress) -> Iterator[tuple[Callable[[], Tensor], int]]:
        rng = random.Random(SEED + progress.num_steps)
        short, long = batches(passages, SHORT_LEN, rng), batches(passages, CONTEXT_LEN, rng)
        while True:
            rows = next(short if progress.elapsed_s / (60 * minutes) < LONG_PHASE else long)
            yield partial(next_token_loss, model, rows), rows[:, 1:].numel()

    return run_training(model, new_optimizers(model), work, minutes, checkpoint)


def run_training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    work: Callable[[Progress], Iterator[tuple[Callable[[], Tensor], int]]],
    minutes: float,
    checkpoint: Path,
) -> Progress:
    """Train until `minutes` have passed in total, including earlier runs that left the checkpoint.

    Args:
        work: returns an iterator of each step's loss and its number of tokens; it may read the progress that it
            is given, which every step updates.
    """
    progress = load_state(checkpoint, [model, *optimizers])
    steps = work(progress)
    last = last_saved = time.monotonic()
    model.train()
    while (share := progress.elapsed_s / (60 * minutes)) < 1:
        loss, num_tokens = next(steps)
        progress.losses.append(train_step(model, optimizers, loss, learning_rate(share)))
        progress.num_steps += 1
        progress.num_tokens += num_tokens
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


def train_step(
    model: nn.Module, optimizers: Sequence[Optimizer], loss_of: Callable[[], Tensor], rate: float
) -> float:
    """Update the weights once and return the loss before the update, as `loss_of` computes it."""
    # Two cores with avx512_bf16: 4,900 tokens/s in bfloat16 autocast, 3,500 in float32, both with SDPA.
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def publish(staging: Path, out: Path) -> None:
    """Move each file over its older version, so that a reader never sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(staging.iterdir()):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
        path.replace(out / path.name)
