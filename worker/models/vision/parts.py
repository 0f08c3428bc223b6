"""Parts that encoders of images share: their layers, rotation by rows and columns, attention within an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        self._num_heads, self._eps = num_heads, form.eps
        self._scale = head_dim**-0.5 if form.scale is None else form.scale
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

        heads = num_heads * head_dim
        self._qkv = linear(form.qkv, size, heads * 3 // len(form.qkv), form.qkv_bias)
        self._output = linear([form.output], heads, size, form.output_bias)
        self._up = linear(form.up, size, inner, form.mlp_bias)
        self._down = linear([form.down], inner, size, form.mlp_bias)
        self._gate = form.activation if len(form.up) == 2 else None
        self._activation = ACTIVATIONS[form.activation]

    def forward(
        self, x: Tensor, lens: Sequence[tuple[int, int]], rotation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """[N, E] -> [N, E].

        Args:
            lens: runs of tokens that attend to each other, as for `attend_within`.
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
        attended = attend_within(q, k, v, lens, self._scale)
        x = x + self._addend(self._output.forward(attended.flatten(1)), 0)
        return x + self._addend(self._down.forward(self._inner(self._norms[1](x))), 1)

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


def attend_within(q: Tensor, k: Tensor, v: Tensor, lens: Sequence[tuple[int, int]], scale: float) -> Tensor:
    """Return attention of [N, H, D] within runs of tokens; `lens` has (number, length) of equal runs in order."""
    outputs, start = [], 0
    for count, length in lens:
        end = start + count * length
        own_q, own_k, own_v = (
            each[start:end].view(count, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v)
        )
        attended = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(outputs)
