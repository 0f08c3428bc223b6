"""Sparse latent attention: scores of the indexer, the choice of tokens, and attention to the chosen ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from quire.kernels import latent_attention, sparse_latent
from quire.kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write
from quire.kernels.latent_attention import ChunkBounds
from quire.kernels.quantized_kv import dequantize, quantize
from quire.kernels.sparse_latent import SelectedTokens, choose_tokens, slots_of

# Numbers of a latent, of a shared key and of the indexer's key; heads of attention and indexer; tokens per block.
LATENT, SHARED, INDEX, HEADS, INDEX_HEADS, BLOCK = 48, 16, 32, 3, 5, 4
ATTENDED = LATENT + SHARED
LENS = [37, 1, 70]
TYPES = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, torch.int8),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=["op", "reference", DEVICE])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Implementation of the ops: as dispatched on a CPU, in PyTorch on a CPU, or in Triton."""
    if request.param == "reference":
        without_native(monkeypatch)
    elif request.param != "op":
        pytest.importorskip("triton")
    return str(request.param)


def select(
    scores: Tensor, tables: Tensor, rows: Tensor, lens: Tensor, block_size: int, top_k: int
) -> SelectedTokens:
    """Return the slots of the tokens with the best scores."""
    top_k = min(top_k, scores.shape[1])
    return slots_of(choose_tokens(scores, lens, top_k), tables, rows, block_size, top_k)


def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all ops computed by PyTorch."""
    for name in ("supports", "supports_logits"):
        monkeypatch.setattr(f"quire.kernels.native.ops.{name}", lambda *arguments: False)
    monkeypatch.setattr(sparse_latent, "is_available", lambda: False)


def implementation(op: Callable[..., Any], module: str, device: str) -> Callable[..., Any]:
    """Return an op as dispatched on a CPU, or its kernel."""
    if device in ("op", "reference"):
        return op
    import importlib

    kernel: Callable[..., Any] = getattr(importlib.import_module(f"quire.kernels.gpu.{module}"), op.__name__)
    return kernel


class Cached:
    """A cache of random rows in shuffled blocks; unused slots hold NaN.

    Attributes:
        sequences: the rows of each sequence as they read back, [L, C + R + I] float64.
    """

    def __init__(self, dtype: torch.dtype, stored: torch.dtype | None, device: str) -> None:
        width, counts = ATTENDED + INDEX, [-(-length // BLOCK) for length in LENS]
        ids = (torch.randperm(sum(counts)) + 1).split(counts)
        num_slots = (sum(counts) + 1) * BLOCK
        rows = torch.full((num_slots, width), torch.nan, dtype=dtype)
        scales = torch.full((num_slots,), torch.nan)
        if stored is not None:
            rows = torch.zeros(num_slots, width).to(stored)
        self.tables = torch.zeros(len(LENS), max(counts) + 1, dtype=torch.int32)
        self.sequences: list[Tensor] = []
        for row, (own, length) in enumerate(zip(ids, LENS, strict=True)):
            self.tables[row, : len(own)] = own.int()
            position = torch.arange(length)
            slots = own[position // BLOCK] * BLOCK + position % BLOCK
            numbers = torch.randn(length, width).to(dtype)
            if stored is None:
                rows[slots] = numbers
                self.sequences.append(numbers.double())
            else:
                codes, scales[slots] = quantize(numbers, stored)
                rows[slots] = codes
                self.sequences.append(dequantize(codes, scales[slots], torch.float64))
        on = "cpu" if device in ("op", "reference") else device
        self.rows = rows.view(-1, 1, 1, BLOCK, width).to(on)
        self.scales = None if stored is None else scales.view(-1, 1, 1, BLOCK).to(on)
        self.tables = self.tables.to(on)
        self.device = on

    @property
    def latents(self) -> Tensor:
        return self.rows[..., :ATTENDED]

    @property
    def keys(self) -> Tensor:
        return self.rows[..., ATTENDED:]


@pytest.mark.parametrize(("dtype", "stored"), TYPES.values(), ids=TYPES)
def test_scores_of_indexer(device: str, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Chunks, single tokens and padding; rows of other widths than the tiles."""
    cached = Cached(dtype, stored, device)
    rows = torch.tensor([0, 0, 0, 1, 2, 2])
    lens = torch.tensor([35, 36, 37, 1, 70, 0], dtype=torch.int32)
    q, weights = torch.randn(6, INDEX_HEADS, INDEX).to(dtype), torch.randn(6, INDEX_HEADS)
    score = implementation(sparse_latent.index_scores, "index_scores", device)
    on_device = (x.to(cached.device) for x in (q, weights))
    others = (x.to(cached.device) for x in (rows, lens))
    scores = score(*on_device, cached.keys, cached.tables, *others, 0, cached.scales).cpu()
    assert scores.shape == (6, cached.tables.shape[1] * BLOCK)
    for token, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        products = torch.relu(q[token].double() @ cached.sequences[row][:length, ATTENDED:].mT)
        wanted = weights[token].double() @ products
        torch.testing.assert_close(
            scores[token, :length].double(), wanted, atol=TOLERANCE[dtype] * 10, rtol=TOLERANCE[dtype]
        )


def test_scores_of_queries_that_attend_to_all_tokens_are_not_computed(device: str) -> None:
    """A query with more tokens than the limit has the same scores beside others as alone."""
    cached = Cached(torch.float32, None, device)
    inputs = [torch.randn(4, INDEX_HEADS, INDEX), torch.randn(4, INDEX_HEADS), cached.keys, cached.tables]
    rows, lens = torch.tensor([0, 0, 1, 2]), torch.tensor([36, 37, 1, 70], dtype=torch.int32)
    score = implementation(sparse_latent.index_scores, "index_scores", device)
    q, weights, *caches, rows, lens = (x.to(cached.device) for x in (*inputs, rows, lens))
    whole = score(q, weights, *caches, rows, lens, 0).cpu()
    some = score(q, weights, *caches, rows, lens, 36).cpu()
    assert torch.equal(some[1, :37], whole[1, :37])
    assert torch.equal(some[3, :70], whole[3, :70])
    alone = score(q[1:2], weights[1:2], *caches, rows[1:2], lens[1:2], 36).cpu()
    if device == "op":  # sums of the C++ op do not depend on the other queries
        assert torch.equal(alone[0, :37], whole[1, :37])
    torch.testing.assert_close(alone[0, :37], whole[1, :37])


def test_twin_scores_tiles_of_queries_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    without_native(monkeypatch)
    cached = Cached(torch.float32, None, "op")
    rows, lens = torch.zeros(7, dtype=torch.int64), torch.arange(30, 37, dtype=torch.int32)
    inputs = torch.randn(7, INDEX_HEADS, INDEX), torch.randn(7, INDEX_HEADS), cached.keys, cached.tables
    whole = sparse_latent.index_scores(*inputs, rows, lens, 0)
    monkeypatch.setattr(sparse_latent, "SCORE_BYTES", 2 * 4 * INDEX_HEADS * 36)
    torch.testing.assert_close(sparse_latent.index_scores(*inputs, rows, lens, 0), whole)


@pytest.fixture(params=["op", "reference"])
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of tokens in C++ or in PyTorch."""
    if request.param == "reference":
        without_native(monkeypatch)


@pytest.mark.usefixtures("choice")
def test_best_tokens_are_chosen_and_of_equal_ones_the_earlier() -> None:
    tables = torch.tensor([[5, 2], [3, 7]], dtype=torch.int32)
    scores = torch.tensor(
        [
            [1.0, 0.0, 3.0, 0.0, 0.0, 2.0, 9.0, 9.0],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, torch.nan, torch.nan],
            [-1.0, -3.0, 9.0, 9.0, 9.0, 9.0, 9.0, torch.inf],
            [torch.nan] * 8,
        ]
    )
    rows, lens = torch.tensor([0, 1, 1, 0]), torch.tensor([6, 6, 2, 0], dtype=torch.int32)
    slots, counts = select(scores, tables, rows, lens, 4, 4)
    assert counts.tolist() == [4, 4, 2, 0]
    assert slots[0].tolist() == [20, 21, 22, 9]  # positions 0, 1, 2 and 5
    assert slots[1].tolist() == [12, 13, 14, 15]
    assert slots[2, :2].tolist() == [12, 13]
    assert slots.dtype == counts.dtype == torch.int32


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize("top_k", [1, 9, 64])
def test_chosen_tokens_equal_those_of_a_sort(top_k: int) -> None:
    """With many equal scores, as of tokens whose products are all negative, and zeros of both signs."""
    num_tokens, width = 40, 64
    scores = torch.randn(num_tokens, width)
    scores = torch.where(scores < 0, torch.where(scores < -1, scores, -0.0), scores.round(decimals=1))
    lens = torch.randint(0, width + 1, (num_tokens,), dtype=torch.int32)
    tables, rows = torch.arange(width // BLOCK, dtype=torch.int32)[None], torch.zeros(num_tokens).long()
    slots, counts = select(scores, tables, rows, lens, BLOCK, top_k)
    for token, length in enumerate(lens.tolist()):
        best = sorted(range(length), key=lambda position: (-scores[token, position], position))
        assert slots[token, : counts[token]].tolist() == sorted(best[:top_k])
    assert slots.shape == (num_tokens, top_k)
    assert torch.all(slots >= 0)


@pytest.mark.usefixtures("choice")
def test_mask_of_chosen_tokens_has_their_slots() -> None:
    scores, lens = torch.randn(5, 32), torch.tensor([32, 20, 7, 1, 0], dtype=torch.int32)
    tables, rows = torch.arange(8, dtype=torch.int32)[None], torch.zeros(5).long()
    slots, counts = select(scores, tables, rows, lens, BLOCK, 7)
    chosen = choose_tokens(scores, lens, 7)
    assert chosen.dtype == torch.bool
    for token, count in enumerate(counts.tolist()):
        assert chosen[token].nonzero().flatten().tolist() == slots[token, :count].tolist()


@pytest.mark.usefixtures("choice")
def test_fewer_tokens_than_the_limit_are_all_chosen() -> None:
    tables, rows = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([0])
    lens = torch.tensor([6], dtype=torch.int32)
    slots, counts = select(torch.randn(1, 8), tables, rows, lens, 4, 2048)
    assert counts.tolist() == [6]
    assert slots[0, :6].tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("dtype", "stored"), TYPES.values(), ids=TYPES)
def test_attention_to_chosen_tokens(device: str, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    cached = Cached(dtype, stored, device)
    chosen = [sorted(torch.randperm(length)[:17].tolist()) for length in LENS]
    tables = cached.tables.cpu()
    slots = torch.zeros(len(LENS), 17, dtype=torch.int32)
    for row, positions in enumerate(chosen):
        for place, position in enumerate(positions):
            slots[row, place] = tables[row, position // BLOCK] * BLOCK + position % BLOCK
    # Padding refers to some slot that may be read.
    selected = SelectedTokens(
        torch.where(slots == 0, slots[:, :1], slots), torch.tensor([len(own) for own in chosen]).int()
    )
    q = torch.randn(len(LENS), HEADS, ATTENDED).to(dtype)
    attend = implementation(sparse_latent.sparse_latent_attention, "sparse_latent", device)
    on_device = (x.to(cached.device) for x in selected)
    out = attend(q.to(cached.device), cached.latents, *on_device, 0.2, LATENT, cached.scales).cpu()
    for row, positions in enumerate(chosen):
        latents = cached.sequences[row][positions, :ATTENDED]
        weights = (q[row].double() @ latents.mT * 0.2).softmax(-1)
        wanted = weights @ latents[:, :LATENT]
        torch.testing.assert_close(out[row].double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_dense_attention_reads_latents_in_wider_rows(device: str, stored: torch.dtype | None) -> None:
    cached = Cached(torch.float32, stored, device)
    whole = cached.latents.contiguous()
    lens = torch.tensor(LENS, dtype=torch.int32, device=cached.device)
    q = torch.randn(len(LENS), HEADS, ATTENDED, device=cached.device)
    decode = implementation(latent_attention.latent_decode_attention, "latent_decode", device)
    outs = [
        decode(q, latents, cached.tables, lens, 0.2, LATENT, None, cached.scales)
        for latents in (cached.latents, whole)
    ]
    assert torch.equal(*outs)
    prefill = implementation(latent_attention.latent_prefill_attention, "latent_prefill", device)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=cached.device)
    expansion = latent_attention.Expansion.of(torch.randn(HEADS, 8 + 16, LATENT, device=cached.device), 8)
    q = torch.randn(3, HEADS, 8 + SHARED, device=cached.device)
    bounds = ChunkBounds([1, 1, 1], LENS)
    outs = [
        prefill(q, latents, cached.tables, starts, lens, bounds, 0.2, expansion, cached.scales)
        for latents in (cached.latents, whole)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_keys_of_indexer_are_written_behind_latents(device: str, stored: torch.dtype | None) -> None:
    on, num_tokens = "cpu" if device in ("op", "reference") else device, 3
    write = implementation(fused_latent_norm_rope_write, "fused_latent_norm_rope_write", device)
    inputs = {
        "projected": torch.randn(num_tokens, ATTENDED),
        "slots": torch.tensor([9, 2, 4]),
        "cos": torch.ones(num_tokens, SHARED),
        "sin": torch.zeros(num_tokens, SHARED),
        "norm": torch.ones(LATENT),
        "keys": 5 * torch.randn(num_tokens, 7 + INDEX)[:, 7:],
    }
    placed = {name: tensor.to(on) for name, tensor in inputs.items()}
    rows = torch.zeros(3, 1, 1, BLOCK, ATTENDED + INDEX).to(stored or torch.float32).to(on)
    scales = None if stored is None else torch.zeros(rows.shape[:-1], device=on)
    q = torch.randn(num_tokens, HEADS, 8 + SHARED, device=on)
    write(
        q, placed["projected"].clone(), rows, placed["slots"], placed["cos"], placed["sin"], placed["norm"], 1e-6,
        False, scales, placed["keys"],
    )  # fmt: skip
    latent = inputs["projected"][:, :LATENT]
    normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 1e-6)
    wanted = torch.cat((normed, inputs["projected"][:, LATENT:], inputs["keys"]), dim=1).double()
    read = rows.cpu().flatten(0, 3)[inputs["slots"]]
    if scales is None:
        torch.testing.assert_close(read.double(), wanted, atol=1e-5, rtol=1e-5)
        return
    numbers = dequantize(read, scales.cpu().flatten()[inputs["slots"]], torch.float64)
    step = wanted.abs().amax(-1, keepdim=True) / (127 if stored == torch.int8 else 16)
    assert torch.all((numbers - wanted).abs() <= step)
