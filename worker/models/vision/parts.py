"""Parts that encoders of images share: their layers, rotation by rows and columns, attention within an image."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import GATED_ACTIVATIONS, clamped_silu_and_mul
from ....kernels.norm import rms_norm
from ...comm.communicator import SingleRank
from ...comm.shard import Shard
from ...weights.weight_slice import Interleaving
from ..layers import ColumnParallelLinear, LayerNorm, Projection, RowParallelLinear
from ..load_context import LoadContext

# Name in a Hugging Face configuration |-> activation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


# The encoding of an image in pieces: yields the share of the work that is done, and returns the embeddings.
Encoding = Generator[float, None, Tensor]
# The work of a layer in pieces: yields the multiplications of each, and returns the layer's output.
Pieces = Generator[int, None, Tensor]
# Queries and keys of a piece of attention, and its least number of queries, which keep a GPU busy.
_PIECE_PAIRS, _MIN_PIECE_QUERIES = 1 << 22, 512
# Runs of tokens that attend to each other: (number, length) of equal runs in order.
Runs = Sequence[tuple[int, int]]
# (some of equal runs, some queries of each) |-> their mask, or addends of their scores, [runs, H, queries, keys].
Bias = Callable[[slice, slice], Tensor]


def read_linear(
    load: LoadContext, names: Sequence[str], in_features: int, out_features: int, *, bias: bool = True
) -> ColumnParallelLinear:
    """Return linear layers of the same input and of equally many outputs as one."""
    parts = [Projection(name, Shard(0, 1, out_features)) for name in names]
    return ColumnParallelLinear(load, parts, in_features, bias)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Form of the layers of a family's encoder, and the names of their modules.

    Attributes:
        norms: before attention and before the feed-forward network.
        qkv: one layer for all three, or three.
        up: the inner layers of the feed-forward network: one, or a gate and another one.
        norm: ``layer`` or ``rms``.
        after: norms of what attention and the feed-forward network add to the residual; empty for none.
        factors: numbers of it, as `after`.
        head_norms: RMSNorms of queries and keys, of each head or of all heads together; empty for none.
        normalizes_values: values have an RMSNorm without weights.
        clips: linear layers clamp their inputs and outputs to stored bounds.
        suffix: of the names of linear layers.
        scale: of the scores; None for that of the head dimension.
        interleaved: elements 2 i and 2 i + 1 of a head's queries and keys are a pair; their rows are reordered as
            they are read.
        clamp: as Experts.clamp, of the feed-forward network.
    """

    norms: tuple[str, str]
    qkv: tuple[str, ...]
    output: str
    up: tuple[str, ...]
    down: str
    norm: str = "layer"
    eps: float = 1e-6
    activation: str = "gelu"
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    after: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()
    head_norm_len: int = 0
    normalizes_values: bool = False
    clips: bool = False
    suffix: str = ""
    scale: float | None = None
    interleaved: bool = False
    clamp: tuple[float, float, float] | None = None


class EncoderLayer:
    """Attention and a feed-forward network, each after a norm and added to the residual.

    Args:
        name: of the layer's modules in the checkpoint.
        size, inner: E, and the inner elements of the feed-forward network.
        num_kv_heads: None for as many as there are heads.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        form: LayerForm,
        size: int,
        inner: int,
        num_heads: int,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        head_dim = size // num_heads if head_dim is None else head_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        load, rank, num_ranks = _sharded(load, form, (num_heads, num_kv_heads), head_dim, inner)
        self._num_heads, self._num_kv_heads = num_heads // num_ranks, num_kv_heads // num_ranks
        self._eps, self._inner_size, self._head_dim = form.eps, inner, head_dim
        self._scale, self._size = head_dim**-0.5 if form.scale is None else form.scale, size
        self._norms = [read_norm(load, f"{name}.{norm}", size, form) for norm in form.norms]
        self._after = [read_norm(load, f"{name}.{norm}", size, form) for norm in form.after]
        self._factors = [load.replicated(f"{name}.{factor}", size) for factor in form.factors]
        self._head_norms = [load.norm(f"{name}.{norm}", form.head_norm_len) for norm in form.head_norms]
        self._value_norm = load.empty(head_dim).fill_(1) if form.normalizes_values else None

        order = Interleaving(head_dim, head_dim) if form.interleaved else None

        def inward(modules: Sequence[str], outputs: Sequence[int], bias: bool) -> Linears:
            """Return layers with these numbers of outputs, of which each rank has a part."""
            names = [f"{name}.{module}{form.suffix}" for module in modules]
            if form.clips:
                return ClippedLinears(load, names, size, outputs[0])
            shards = [Shard(rank, num_ranks, length) for length in outputs]
            if len(names) < len(shards):
                parts = [
                    Projection(names[0], shard, start, sum(outputs))
                    for shard, start in zip(shards, accumulate(outputs, initial=0), strict=False)
                ]
            else:
                orders = [order] * 2 + [None] if modules is form.qkv else [None] * len(names)
                parts = [
                    Projection(each, shard, interleaving=own)
                    for each, shard, own in zip(names, shards, orders, strict=True)
                ]
            return ColumnParallelLinear(load, parts, size, bias)

        def outward(module: str, num_inputs: int, bias: bool) -> ClippedLinears | RowParallelLinear:
            own = f"{name}.{module}{form.suffix}"
            if form.clips:
                return ClippedLinears(load, [own], num_inputs, size)
            return RowParallelLinear(load, own, num_inputs, size, bias)

        self._heads_size, self._kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self._qkv = inward(form.qkv, (self._heads_size, self._kv_size, self._kv_size), form.qkv_bias)
        self._output = outward(form.output, self._heads_size, form.output_bias)
        self._up = inward(form.up, [inner] * len(form.up), form.mlp_bias)
        self._down = outward(form.down, inner, form.mlp_bias)
        self._gate = form.activation if len(form.up) == 2 else None
        self._activation, self._clamp = ACTIVATIONS[form.activation], form.clamp

    def work(self, num_tokens: int, runs: Runs) -> int:
        """Return the multiplications of the layer: the sum of what `forward` yields."""
        return sum(self._linear_work(num_tokens, part) for part in range(3)) + self._pair_work(
            sum(count * length**2 for count, length in runs)
        )

    def _linear_work(self, num_tokens: int, part: int) -> int:
        """Return the multiplications of the projections before attention, of that after it, and of the network."""
        num_inner = 3 if self._gate is not None else 2
        outputs = (self._heads_size + 2 * self._kv_size, self._heads_size, num_inner * self._inner_size)
        return num_tokens * self._size * outputs[part]

    def _pair_work(self, num_pairs: int) -> int:
        return 2 * num_pairs * self._heads_size

    def forward(
        self,
        x: Tensor,
        runs: Runs,
        rotation: Callable[[Tensor], Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Pieces:
        """[N, E] -> [N, E].

        Args:
            runs: of tokens that attend to each other.
            rotation: of queries and keys [N, H, D]; None for none.
            mask: [length, length], keys that each query of a run attends to; None for all.
        """
        q, k, v = self._project(self._norms[0](x), rotation)
        yield self._linear_work(len(x), 0)
        bias = None if mask is None else partial(_rows_of, mask)
        attended = yield from self._attend(q, k, v, runs, bias)
        return (yield from self._finish(x, attended))

    def _project(
        self, x: Tensor, rotation: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of normalized tokens, [N, H, D] each."""
        heads = self._num_heads, self._num_kv_heads, self._num_kv_heads
        q, k, v = self._qkv.forward(x).view(len(x), -1, self._head_dim).split(heads, dim=1)
        if self._head_norms:
            q, k = (
                rms_norm(own.reshape(-1, len(weight)), weight, self._eps).view(own.shape)
                for own, weight in zip((q, k), self._head_norms, strict=True)
            )
        if self._value_norm is not None:
            v = rms_norm(v.contiguous(), self._value_norm, self._eps)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        if self._num_kv_heads < self._num_heads:
            k, v = (each.repeat_interleave(self._num_heads // self._num_kv_heads, dim=1) for each in (k, v))
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, bias: Bias | None) -> Pieces:
        """Return the results of the heads, [N, H * D]."""
        attended = []
        for piece, num_pairs in attend_within(q, k, v, runs, self._scale, bias):
            attended.append(piece)
            yield self._pair_work(num_pairs)
        return torch.cat(attended).flatten(1)

    def _finish(self, x: Tensor, attended: Tensor) -> Pieces:
        """Return the layer's output from its input and the results of the heads."""
        x = x + self._addend(self._output.forward(attended), 0)
        yield self._linear_work(len(x), 1)
        x = x + self._addend(self._down.forward(self._inner(self._norms[1](x))), 1)
        yield self._linear_work(len(x), 2)
        return x

    def _inner(self, x: Tensor) -> Tensor:
        if self._gate is None:
            return self._activation(self._up.forward(x))
        if self._clamp is not None:
            return clamped_silu_and_mul(self._up.forward(x), *self._clamp)
        if isinstance(self._up, ColumnParallelLinear) and self._gate in GATED_ACTIVATIONS:
            return self._up.forward_gated(x, self._gate)
        gate, up = self._up.forward(x).chunk(2, dim=1)
        return self._activation(gate) * up

    def _addend(self, x: Tensor, part: int) -> Tensor:
        if self._after:
            x = self._after[part](x)
        return x * self._factors[part] if self._factors else x


def _rows_of(mask: Tensor, runs: slice, queries: slice) -> Tensor:
    """Return the mask of some queries, which is that of each run."""
    return mask[queries]


def _sharded(
    load: LoadContext, form: LayerForm, num_heads: tuple[int, int], head_dim: int, inner: int
) -> tuple[LoadContext, int, int]:
    """Return the context of a layer, and which of how many parts of it this rank has.

    Each rank has the whole layer if its heads or inner elements cannot be divided, if a norm or bounds are those of
    all heads together, or if it is quantized, in groups of its own.
    """
    num_ranks = load.comm.size
    divides = all(each % num_ranks == 0 for each in (*num_heads, inner))
    has_whole = (
        form.clips or (form.head_norms and form.head_norm_len != head_dim) or load.quantization is not None
    )
    if divides and not has_whole:
        return load, load.comm.rank, num_ranks
    return replace(load, comm=SingleRank()), 0, 1


class ClippedLinears:
    """Linear layers of the same input, without biases, that clamp inputs and outputs to bounds of their own."""

    def __init__(self, load: LoadContext, names: Sequence[str], in_features: int, out_features: int) -> None:
        self._layers = [
            (
                read_linear(load, [f"{name}.linear"], in_features, out_features, bias=False),
                [
                    load.replicated(f"{name}.{side}_{bound}")
                    for side in ("input", "output")
                    for bound in ("min", "max")
                ],
            )
            for name in names
        ]

    def forward(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, sum of the outputs]."""
        parts = []
        for linear, (in_min, in_max, out_min, out_max) in self._layers:
            parts.append(linear.forward(x.clamp(in_min, in_max)).clamp(out_min, out_max))
        return torch.cat(parts, dim=1)


Linears = ColumnParallelLinear | ClippedLinears


def read_norm(load: LoadContext, name: str, size: int, form: LayerForm) -> Callable[[Tensor], Tensor]:
    """Return a norm of a form's kind."""
    if form.norm == "layer":
        return read_layer_norm(load, name, size, form.eps).apply
    weight = load.norm(name, size)
    return lambda x: rms_norm(x, weight, form.eps)


def read_layer_norm(load: LoadContext, name: str, size: int, eps: float) -> LayerNorm:
    """Return a LayerNorm with a bias."""
    return LayerNorm(load.replicated(f"{name}.weight", size), load.replicated(f"{name}.bias", size), eps)


def block_order(rows: int, columns: int, merge_size: int) -> Tensor:
    """Return the patches, counted by row, in the order in which those that one embedding covers follow each other."""
    grid = torch.arange(rows * columns).view(
        rows // merge_size, merge_size, columns // merge_size, merge_size
    )
    return grid.transpose(1, 2).flatten()


def window_order(frames: int, rows: int, columns: int, side: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return an order of an image's embeddings in which those of a window follow each other.

    Windows of equal numbers of embeddings follow each other too, frame by frame, so that they are attended together.

    Returns:
        [frames * rows * columns] int64, and (number, length) of equal windows in this order.
    """
    places = torch.arange(frames * rows * columns).view(frames, rows, columns)
    windows = [
        places[frame, top : top + side, left : left + side].flatten()
        for frame in range(frames)
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    lens: list[tuple[int, int]] = []
    ordered: list[Tensor] = []
    for frame in range(frames):
        own = windows[frame * len(windows) // frames : (frame + 1) * len(windows) // frames]
        for window in sorted(own, key=len):
            if lens and lens[-1][1] == len(window):
                lens[-1] = (lens[-1][0] + 1, len(window))
            else:
                lens.append((1, len(window)))
            ordered.append(window)
    return torch.cat(ordered), lens


def grid_angles(
    rows: int, columns: int, merge_size: int, head_dim: int, theta: float, first: int = 0
) -> Tensor:
    """Return the angles of each patch, [rows * columns, head_dim / 2]: first those by row, then those by column.

    The patches that one embedding covers follow each other.

    Args:
        first: number of the first row and column.
    """
    frequencies = theta ** -(torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    order = block_order(rows, columns, merge_size)
    places = torch.stack((order // columns, order % columns), dim=1).to(torch.float32) + first
    return (places[:, :, None] * frequencies).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [N, H, D] by angles [N, D / 2] in float32: element i of a head pairs with element i + D/2."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [N, H, D] by angles [N, D / 2] in float32: element 2 i of a head pairs with element 2 i + 1."""
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, bias: Bias | None = None
) -> Iterator[tuple[Tensor, int]]:
    """Yield attention of [N, H, D] within runs of tokens, of one tokens after the other.

    How it is cut depends on the runs alone, so that its numbers do not depend on the steps in which it is computed.

    Args:
        bias: of the scores, if all runs are equal; None for none.

    Yields:
        A piece [n, H, D], and its pairs of queries and keys.
    """
    start = 0
    for count, length in runs:
        end = start + count * length
        own_q, own_k, own_v = (
            each[start:end].view(count, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v)
        )
        start = end
        num_runs = max(1, _PIECE_PAIRS // length**2)
        num_queries = length if num_runs > 1 else max(_MIN_PIECE_QUERIES, _PIECE_PAIRS // length)
        for first in range(0, count, num_runs):
            some = slice(first, first + num_runs)
            for query in range(0, length, num_queries):
                part = slice(query, query + num_queries)
                attended = F.scaled_dot_product_attention(
                    own_q[some, :, part],
                    own_k[some],
                    own_v[some],
                    None if bias is None else bias(some, part),
                    scale=scale,
                )
                num_pairs = attended.shape[0] * attended.shape[2] * length
                yield attended.transpose(1, 2).flatten(0, 1), num_pairs


def encode_layers(
    layers: Sequence[EncoderLayer],
    x: Tensor,
    runs: Callable[[int], Runs],
    rotation: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[int, Tensor], None] = lambda index, x: None,
    mask: Tensor | None = None,
) -> Encoding:
    """Pass [N, E] through the layers of an encoder, in pieces.

    Args:
        runs: of tokens that attend to each other in a layer.
        rotation, mask: see EncoderLayer.forward.
        after: called with each layer's output.
    """
    total = sum(layer.work(len(x), runs(index)) for index, layer in enumerate(layers))
    done = 0
    for index, layer in enumerate(layers):
        pieces = layer.forward(x, runs(index), rotation, mask)
        while True:
            try:
                done += next(pieces)
            except StopIteration as end:
                x = end.value
                break
            yield done / total
        after(index, x)
    return x


def as_part(encoding: Encoding, start: float, share: float) -> Encoding:
    """Pass on an encoding that is a part of another one.

    Args:
        start, share: of the whole work, before this part and of it.
    """
    while True:
        try:
            done = next(encoding)
        except StopIteration as end:
            result: Tensor = end.value
            return result
        yield start + share * done


def encode_views(tensors: Mapping[str, Tensor], encode_tiles: Callable[[Tensor], Encoding]) -> Encoding:
    """Return the embeddings of an image's tiles, if it has some, and then those of the whole image, [rows, E].

    Args:
        tensors: ``pixel_values`` and ``pixel_values_local``, of tiles, each [..., C, H, W].
        encode_tiles: [tiles, C, H, W] -> [rows, E].
    """
    views = [
        tensors[name].flatten(0, -4) for name in ("pixel_values_local", "pixel_values") if name in tensors
    ]
    total, done, embeddings = sum(view.numel() for view in views), 0.0, []
    for view in views:
        share = view.numel() / total
        embeddings.append((yield from as_part(encode_tiles(view), done, share)))
        done += share
    return torch.cat(embeddings)
