"""Parts that encoders of images share: their layers, rotation by rows and columns, attention within an image."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import GATED_ACTIVATIONS
from ....kernels.norm import rms_norm
from ...comm.shard import Shard
from ..layers import ColumnParallelLinear, LayerNorm, Projection
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


class EncoderLayer:
    """Attention and a feed-forward network, each after a norm and added to the residual.

    Args:
        name: of the layer's modules in the checkpoint.
        size, inner: E, and the inner elements of the feed-forward network.
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
    ) -> None:
        head_dim = size // num_heads if head_dim is None else head_dim
        self._num_heads, self._eps, self._inner_size = num_heads, form.eps, inner
        self._scale, self._size = head_dim**-0.5 if form.scale is None else form.scale, size
        self._norms = [read_norm(load, f"{name}.{norm}", size, form) for norm in form.norms]
        self._after = [read_norm(load, f"{name}.{norm}", size, form) for norm in form.after]
        self._factors = [load.replicated(f"{name}.{factor}", size) for factor in form.factors]
        self._head_norms = [load.norm(f"{name}.{norm}", form.head_norm_len) for norm in form.head_norms]
        self._value_norm = load.empty(head_dim).fill_(1) if form.normalizes_values else None

        def linear(modules: Sequence[str], in_features: int, out_features: int, bias: bool) -> Linears:
            names = [f"{name}.{module}{form.suffix}" for module in modules]
            if form.clips:
                return ClippedLinears(load, names, in_features, out_features)
            return read_linear(load, names, in_features, out_features, bias=bias)

        self._heads_size = heads = num_heads * head_dim
        self._qkv = linear(form.qkv, size, heads * 3 // len(form.qkv), form.qkv_bias)
        self._output = linear([form.output], heads, size, form.output_bias)
        self._up = linear(form.up, size, inner, form.mlp_bias)
        self._down = linear([form.down], inner, size, form.mlp_bias)
        self._gate = form.activation if len(form.up) == 2 else None
        self._activation = ACTIVATIONS[form.activation]

    def work(self, num_tokens: int, runs: Runs) -> int:
        """Return the multiplications of the layer: the sum of what `forward` yields."""
        return sum(self._linear_work(num_tokens, part) for part in range(3)) + self._pair_work(
            sum(count * length**2 for count, length in runs)
        )

    def _linear_work(self, num_tokens: int, part: int) -> int:
        """Return the multiplications of the projections before attention, of that after it, and of the network."""
        num_inner = 3 if self._gate is not None else 2
        outputs = (3 * self._heads_size, self._heads_size, num_inner * self._inner_size)
        return num_tokens * self._size * outputs[part]

    def _pair_work(self, num_pairs: int) -> int:
        return 2 * num_pairs * self._heads_size

    def forward(self, x: Tensor, runs: Runs, rotation: Callable[[Tensor], Tensor] | None = None) -> Pieces:
        """[N, E] -> [N, E].

        Args:
            runs: of tokens that attend to each other.
            rotation: of queries and keys [N, H, D]; None for none.
        """
        q, k, v = self._qkv.forward(self._norms[0](x)).view(len(x), 3, self._num_heads, -1).unbind(1)
        if self._head_norms:
            q, k = (
                rms_norm(own.reshape(-1, len(weight)), weight, self._eps).view(own.shape)
                for own, weight in zip((q, k), self._head_norms, strict=True)
            )
        if self._value_norm is not None:
            v = rms_norm(v.contiguous(), self._value_norm, self._eps)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        yield self._linear_work(len(x), 0)
        attended = []
        for piece, num_pairs in attend_within(q, k, v, runs, self._scale):
            attended.append(piece)
            yield self._pair_work(num_pairs)
        x = x + self._addend(self._output.forward(torch.cat(attended).flatten(1)), 0)
        yield self._linear_work(len(x), 1)
        x = x + self._addend(self._down.forward(self._inner(self._norms[1](x))), 1)
        yield self._linear_work(len(x), 2)
        return x

    def _inner(self, x: Tensor) -> Tensor:
        if self._gate is None:
            return self._activation(self._up.forward(x))
        if isinstance(self._up, ColumnParallelLinear) and self._gate in GATED_ACTIVATIONS:
            return self._up.forward_gated(x, self._gate)
        gate, up = self._up.forward(x).chunk(2, dim=1)
        return self._activation(gate) * up

    def _addend(self, x: Tensor, part: int) -> Tensor:
        if self._after:
            x = self._after[part](x)
        return x * self._factors[part] if self._factors else x


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


def grid_angles(rows: int, columns: int, merge_size: int, head_dim: int, theta: float) -> Tensor:
    """Return the angles of each patch, [rows * columns, head_dim / 2]: first those by row, then those by column.

    The patches that one embedding covers follow each other.
    """
    frequencies = theta ** -(torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    order = block_order(rows, columns, merge_size)
    places = torch.stack((order // columns, order % columns), dim=1).to(torch.float32)
    return (places[:, :, None] * frequencies).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [N, H, D] by angles [N, D / 2] in float32: element i of a head pairs with element i + D/2."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attend_within(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> Iterator[tuple[Tensor, int]]:
    """Yield attention of [N, H, D] within runs of tokens, of one tokens after the other.

    How it is cut depends on the runs alone, so that its numbers do not depend on the steps in which it is computed.

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
                queries = own_q[some, :, query : query + num_queries]
                attended = F.scaled_dot_product_attention(queries, own_k[some], own_v[some], scale=scale)
                num_pairs = attended.shape[0] * attended.shape[2] * length
                yield attended.transpose(1, 2).flatten(0, 1), num_pairs


def encode_layers(
    layers: Sequence[EncoderLayer],
    x: Tensor,
    runs: Callable[[int], Runs],
    rotation: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[int, Tensor], None] = lambda index, x: None,
) -> Encoding:
    """Pass [N, E] through the layers of an encoder, in pieces.

    Args:
        runs: of tokens that attend to each other in a layer.
        rotation: of queries and keys; None for none.
        after: called with each layer's output.
    """
    total = sum(layer.work(len(x), runs(index)) for index, layer in enumerate(layers))
    done = 0
    for index, layer in enumerate(layers):
        pieces = layer.forward(x, runs(index), rotation)
        while True:
            try:
                done += next(pieces)
            except StopIteration as end:
                x = end.value
                break
            yield done / total
        after(index, x)
    return x
