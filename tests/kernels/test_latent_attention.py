"""Latent attention, absorbed and expanded, against float64 attention to each token's own keys and values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from quire.kernels import decode_splits, latent_attention
from quire.kernels.dispatch import twin_of
from quire.kernels.fused_latent_norm_rope_write import fused_latent_norm_rope_write
from quire.kernels.latent_attention import (
    ChunkBounds,
    Expansion,
    latent_decode_attention,
    latent_prefill_attention,
)
from quire.kernels.quantized_kv import dequantize, quantize

SCALE = 0.2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Heads, length of a latent, of a shared key, of a head's own key and of its value, and tokens per block.
SHAPES = [(3, 48, 16, 24, 16, 16), (4, 512, 64, 128, 128, 16), (5, 40, 24, 16, 32, 4)]
# dtypes of the queries and of the stored latents
TYPES = {
    "float32": (torch.float32, None),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, torch.int8),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
# All types with one shape, and all shapes with one type: Triton's interpreter takes seconds for each.
CASES = [(SHAPES[0], *types) for types in TYPES.values()] + [
    (shape, *TYPES["float32"]) for shape in SHAPES[1:]
]
STORED = {"as computed": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}

Op = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make items so small that short sequences have several."""
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 6)
    monkeypatch.setattr(decode_splits, "MIN_ITEM_LEN", 32)


@pytest.fixture(params=["op", "reference", DEVICE])
def ops(request: pytest.FixtureRequest) -> tuple[Op, Op, str]:
    """Return absorbed and expanded attention and their device: as dispatched on a CPU, in PyTorch, and in Triton."""
    if request.param == "op":
        return latent_decode_attention, latent_prefill_attention, "cpu"
    if request.param == "reference":
        return _without_native(latent_decode_attention), _without_native(latent_prefill_attention), "cpu"
    pytest.importorskip("triton")
    from quire.kernels.gpu import latent_decode, latent_prefill

    return latent_decode.latent_decode_attention, latent_prefill.latent_prefill_attention, request.param


def _without_native(op: Op) -> Op:
    def call(*args: object) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.kernels.native.ops.supports", lambda x, length=0: False)
            return twin_of(op)(*args)

    return call


class Cached:
    """A cache of random latents in shuffled blocks; unused slots hold NaN.

    Attributes:
        sequences: of each sequence, its latents as they read back, [L, D] float64.
    """

    def __init__(
        self, lens: list[int], dim: int, block_size: int, dtype: torch.dtype, stored: torch.dtype | None
    ) -> None:
        counts = [-(-length // block_size) for length in lens]
        ids = (torch.randperm(sum(counts)) + 1).tolist()
        shape = sum(counts) + 1, 1, 1, block_size, dim
        self.scales = None
        if stored is None:
            self.latents = torch.full(shape, torch.nan, dtype=dtype)
        else:
            self.latents = torch.zeros(shape).to(stored)
            self.scales = torch.full(shape[:-1], torch.nan)
        self.tables = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.sequences: list[Tensor] = []
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            own, ids = ids[:count], ids[count:]
            self.tables[row, :count] = torch.tensor(own, dtype=torch.int32)
            slots = torch.tensor(own)[torch.arange(length) // block_size] * block_size
            slots += torch.arange(length) % block_size
            numbers = torch.randn(length, dim).to(dtype)
            flat = self.latents.view(-1, dim)
            if stored is None:
                flat[slots] = numbers
                self.sequences.append(numbers.double())
            else:
                assert self.scales is not None
                codes, scales = quantize(numbers, stored)
                flat[slots] = codes
                self.scales.view(-1)[slots] = scales
                self.sequences.append(dequantize(codes, scales, torch.float64))

    def to(self, device: str) -> None:
        self.latents, self.tables, self.lens = (x.to(device) for x in (self.latents, self.tables, self.lens))
        self.scales = None if self.scales is None else self.scales.to(device)


def expected(
    q: Tensor, latents: Tensor, expansion: Tensor, key_dim: int, visible: Tensor | None = None
) -> Tensor:
    """Return the attention of a sequence's last n tokens, [n, Hq, V] float64, with its keys and values in full.

    Args:
        visible: [n, L] bool.
    """
    latent_dim = expansion.shape[2]
    keys_values = torch.einsum("lc,hdc->lhd", latents[:, :latent_dim], expansion.double().cpu())
    shared = latents[:, None, latent_dim:].expand(-1, q.shape[1], -1)
    keys = torch.cat((keys_values[..., :key_dim], shared), dim=-1)
    scores = torch.einsum("nhd,lhd->hnl", q.double().cpu(), keys) * SCALE
    num_queries, num_keys = scores.shape[1:]
    hidden = torch.arange(num_keys) > torch.arange(num_keys - num_queries, num_keys)[:, None]
    if visible is not None:
        hidden |= ~visible
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, keys_values[..., key_dim:])


def make(
    shape: tuple[int, ...], lens: list[int], dtype: torch.dtype, stored: torch.dtype | None = None
) -> Cached:
    return Cached(lens, shape[1] + shape[2], shape[5], dtype, stored)


def random_expansion(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    heads, latent_dim, _, key_dim, value_dim, _ = shape
    return (torch.randn(heads, key_dim + value_dim, latent_dim) / latent_dim**0.5).to(dtype)


@pytest.mark.parametrize(("shape", "dtype", "stored"), CASES, ids=str)
def test_absorbed_attention_to_latents(
    ops: tuple[Op, Op, str], shape: tuple[int, ...], dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    decode, _, device = ops
    heads, latent_dim, shared_dim, *_ = shape
    cached = make(shape, [1, 70, 33], dtype, stored)
    q = torch.randn(3, heads, latent_dim + shared_dim).to(dtype)
    # Absorbed attention is attention to one key head whose values are the first numbers of its keys.
    identity = torch.eye(latent_dim).repeat(heads, 2, 1)
    wanted = torch.stack(
        [expected(q[i : i + 1], cached.sequences[i], identity, latent_dim)[0] for i in range(3)]
    )
    cached.to(device)
    out = decode(
        q.to(device), cached.latents, cached.tables, cached.lens, SCALE, latent_dim, None, cached.scales
    )
    torch.testing.assert_close(out.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("shape", "dtype", "stored"), CASES, ids=str)
def test_expanded_attention_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
    ops: tuple[Op, Op, str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    stored: torch.dtype | None,
) -> None:
    """With so little memory for keys and values that heads, and on a GPU sequences, are expanded in groups."""
    _, prefill, device = ops
    heads, _, shared_dim, key_dim, *_ = shape
    few_bytes = 2 * 60 * (key_dim + shape[4]) * dtype.itemsize
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", few_bytes)
    if "gpu" in prefill.__module__:
        monkeypatch.setattr("quire.kernels.gpu.latent_prefill.EXPANDED_BYTES", few_bytes)
    # The first chunk is a whole sequence, the others follow a cached prefix.
    lens, chunk_lens = [37, 50, 9, 20], [37, 18, 0, 1]
    cached = make(shape, lens, dtype, stored)
    starts = [0, *accumulate(chunk_lens)]
    q = torch.randn(starts[-1], heads, key_dim + shared_dim).to(dtype)
    expansion = random_expansion(shape, dtype)
    wanted = torch.cat(
        [
            expected(q[start:end], latents, expansion, key_dim)
            for (start, end), latents in zip(pairwise(starts), cached.sequences, strict=True)
        ]
    )
    cached.to(device)
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    bounds = ChunkBounds(chunk_lens, lens)
    arguments = (
        cached.latents,
        cached.tables,
        query_start,
        cached.lens,
        bounds,
        SCALE,
        Expansion.of(expansion.to(device), key_dim),
    )
    out = prefill(q.to(device), *arguments, cached.scales)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", [DEVICE])
def test_expanded_chunk_has_the_same_bits_in_any_batch(device: str) -> None:
    """Of numbers whose expansion is exact, since matrix products of PyTorch may depend on their number of rows."""
    pytest.importorskip("triton")
    from quire.kernels.gpu.latent_prefill import latent_prefill_attention as prefill

    shape = SHAPES[0]
    lens, chunk_lens = [37, 50, 20], [37, 18, 1]
    cached = make(shape, lens, torch.float32)
    cached.latents = (4 * cached.latents).round() / 4
    expansion = ((16 * random_expansion(shape, torch.float32)).round() / 16).to(device)
    q = torch.randn(sum(chunk_lens), shape[0], shape[2] + shape[3]).to(device)
    cached.to(device)

    def attend(rows: slice, first: int, last: int) -> Tensor:
        starts = torch.tensor([0, *accumulate(chunk_lens[rows])], dtype=torch.int32, device=device)
        bounds = ChunkBounds(chunk_lens[rows], lens[rows])
        own = cached.latents, cached.tables[rows], starts, cached.lens[rows], bounds
        return prefill(q[first:last], *own, SCALE, Expansion.of(expansion, shape[3]))

    together = attend(slice(0, 3), 0, 56)
    ends = [0, *accumulate(chunk_lens)]
    for row, (start, end) in enumerate(pairwise(ends)):
        assert torch.equal(attend(slice(row, row + 1), start, end), together[start:end])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expanded_attention_to_visible_tokens(ops: tuple[Op, Op, str], shape: tuple[int, ...]) -> None:
    """A mask hides whole tiles of keys, the first of a query among them; it is wider than the sequences."""
    _, prefill, device = ops
    heads, _, shared_dim, key_dim, *_ = shape
    lens, chunk_lens, dtype = [37, 150, 9], [37, 18, 0], torch.float32
    cached = make(shape, lens, dtype)
    starts = [0, *accumulate(chunk_lens)]
    q = torch.randn(starts[-1], heads, key_dim + shared_dim)
    expansion = random_expansion(shape, dtype)
    visible = torch.rand(starts[-1], 171) < 0.3
    visible[40:50, :130] = False
    positions = [*range(37), *range(132, 150)]
    visible[torch.arange(len(q)), torch.tensor(positions)] = True
    wanted = torch.cat(
        [
            expected(q[start:end], latents, expansion, key_dim, visible[start:end, : len(latents)])
            for (start, end), latents in zip(pairwise(starts), cached.sequences, strict=True)
        ]
    )
    cached.to(device)
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    bounds = ChunkBounds(chunk_lens, lens)
    arguments = (
        cached.latents,
        cached.tables,
        query_start,
        cached.lens,
        bounds,
        SCALE,
        Expansion.of(expansion.to(device), key_dim),
    )
    out = prefill(q.to(device), *arguments, None, visible.to(device))
    torch.testing.assert_close(out.cpu().double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["op", DEVICE])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_rotation_and_write(
    implementation: str, shape: tuple[int, ...], interleaved: bool, stored: torch.dtype | None
) -> None:
    op, device = fused_latent_norm_rope_write, "cpu"
    if implementation != "op":
        pytest.importorskip("triton")
        from quire.kernels.gpu import fused_latent_norm_rope_write as module

        op, device = module.fused_latent_norm_rope_write, implementation
    heads, latent_dim, shared_dim, key_dim, *_ = shape
    num_tokens = 5
    q = torch.randn(num_tokens, heads, key_dim + shared_dim)
    projected = torch.randn(num_tokens, 7 + latent_dim + shared_dim)[:, 7:]
    norm = torch.randn(latent_dim)
    angles = torch.randn(num_tokens, shared_dim // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=1)
    slots = torch.randperm(num_tokens * 2)[:num_tokens] + 4
    latents = torch.zeros(8, 1, 1, 4, latent_dim + shared_dim).to(stored or torch.float32)
    scales = None if stored is None else torch.zeros(latents.shape[:-1])

    def rotate(x: Tensor) -> Tensor:
        """Rotate [T, ..., R] in float64."""
        x = x.double()
        low, high = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        c, s = (
            part.double().view(num_tokens, *[1] * (x.dim() - 2), -1) for part in (angles.cos(), angles.sin())
        )
        return torch.cat((low * c - high * s, high * c + low * s), dim=-1)

    wanted_q = torch.cat((q[..., :key_dim].double(), rotate(q[..., key_dim:])), dim=-1)
    latent = projected[:, :latent_dim].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    wanted = torch.cat((normed, rotate(projected[:, latent_dim:])), dim=1)
    q, latents = q.to(device), latents.to(device)
    scales = None if scales is None else scales.to(device)
    slots, cos, sin, norm = (x.to(device) for x in (slots, cos, sin, norm))
    op(q, projected.to(device), latents, slots, cos, sin, norm, 1e-6, interleaved, scales)
    torch.testing.assert_close(q.cpu().double(), wanted_q, atol=1e-5, rtol=1e-5)
    stored_rows = latents.cpu().view(-1, latents.shape[-1])[slots.cpu()]
    if scales is None:
        torch.testing.assert_close(stored_rows.double(), wanted, atol=1e-5, rtol=1e-5)
    else:
        read = dequantize(stored_rows, scales.cpu().view(-1)[slots.cpu()], torch.float64)
        step = wanted.abs().amax(-1, keepdim=True) / (127 if stored == torch.int8 else 16)
        assert torch.all((read - wanted).abs() <= step)
