"""Parts that encoders of images share: linear layers, rotation by rows and columns, attention within an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm.shard import Shard
from ..layers import ColumnParallelLinear, LayerNorm, Projection
from ..load_context import LoadContext

# Name in a Hugging Face configuration |-> activation.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def read_linear(
    load: LoadContext, names: Sequence[str], in_features: int, out_features: int, *, bias: bool = True
) -> ColumnParallelLinear:
    """Return linear layers of the same input and of equally many outputs as one."""
    parts = [Projection(name, Shard(0, 1, out_features)) for name in names]
    return ColumnParallelLinear(load, parts, in_features, bias)


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
