"""Sampling of one step's rows, beside PyTorch's argmax and topk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.op_case import Op, OpCase
from benchmarks.gpu.sizes import Sizes
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from quire.kernels.sampling import sample_full, sample_greedy, sample_top_k_top_p, topk_tokens

# Logits, temperatures and keys.
Inputs = tuple[Tensor, Tensor, Tensor]


def sampler_cases(sizes: Sizes) -> Iterator[OpCase]:
    """Yield sampling of one step's rows; bytes are those of one pass over the logits."""
    vocab, device = sizes.model.vocab_size, sizes.device
    for rows in sizes.num_sampled:
        logits_bytes = 4 * rows * vocab

        def inputs(rows: int = rows) -> Inputs:
            logits = 3 * torch.randn(rows, vocab, device=device)
            keys = torch.arange(2 * rows, dtype=torch.int32, device=device).view(-1, 2)
            return logits, torch.ones(rows, device=device), keys

        def make_greedy(index: int, inputs: Callable[[], Inputs] = inputs) -> Op:
            return partial(sample_greedy, inputs()[0])

        def make_argmax(index: int, inputs: Callable[[], Inputs] = inputs) -> Op:
            return partial(inputs()[0].max, dim=-1)

        def make_full(index: int, inputs: Callable[[], Inputs] = inputs) -> Op:
            return partial(sample_full, *inputs())

        def make_processed(index: int, inputs: Callable[[], Inputs] = inputs) -> Op:
            logits, ones, keys = inputs()
            processors = random_processors(len(logits), vocab, device)
            return lambda: sample_full(logits, ones, keys, logits_processors=processors)

        def make_kept(index: int, inputs: Callable[[], Inputs] = inputs, top_k: int = 50) -> Op:
            logits, ones, keys = inputs()
            ks = torch.full((len(logits),), top_k, device=device)
            return partial(sample_top_k_top_p, logits, ones, ks, 0.9 * ones.double(), 0 * ones, keys)

        def make_top(index: int, inputs: Callable[[], Inputs] = inputs) -> Op:
            return partial(topk_tokens, inputs()[0], 20)

        def make_topk(index: int, inputs: Callable[[], Inputs] = inputs) -> Op:
            return partial(inputs()[0].topk, 20)

        yield OpCase(f"sample_greedy.{rows}", device, logits_bytes, 0, make_greedy, {"torch": make_argmax})
        yield OpCase(f"sample_full.{rows}", device, logits_bytes, 0, make_full)
        yield OpCase(f"sample_full.logits_processors.{rows}", device, logits_bytes, 0, make_processed)
        yield OpCase(f"sample_top_k_top_p.{rows}", device, logits_bytes, 0, make_kept)
        nucleus = partial(make_kept, top_k=vocab)
        yield OpCase(f"sample_top_k_top_p.nucleus.{rows}", device, logits_bytes, 0, nucleus)
        yield OpCase(f"topk_tokens.{rows}", device, logits_bytes, 0, make_top, {"torch": make_topk})


def random_processors(num_rows: int, vocab_size: int, device: str) -> LogitsProcessors:
    """Return a mask of half the vocabulary, penalties and ten biases for every row."""
    rows = torch.arange(num_rows, device=device)
    counts = torch.randint(0, 2, (num_rows, vocab_size), dtype=torch.int16, device=device)
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)
    columns = torch.randint(vocab_size, (num_rows, 10), dtype=torch.int32, device=device).sort(dim=1).values
    starts = 10 * torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    return LogitsProcessors(
        vocab_size,
        Biases(starts, columns.flatten(), torch.ones(10 * num_rows, device=device)),
        Penalties(rows, counts, words, torch.full((num_rows, 3), 1.1, device=device)),
        Masks(rows, words),
    )
