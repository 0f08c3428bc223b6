"""Encoder of Qwen3-VL (Qwen team, 2025) and Qwen3.5: learned positions, and deep features of some layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....proto.vision import VisionSpec
from ..layers import LayerNorm
from ..load_context import LoadContext
from .parts import (
    EncoderLayer,
    Encoding,
    LayerForm,
    block_order,
    encode_layers,
    grid_angles,
    read_layer_norm,
    read_linear,
    rotate,
)

_NORM_EPS = 1e-6
_THETA = 10000.0
_LAYER = LayerForm(
    ("norm1", "norm2"),
    ("attn.qkv",),
    "attn.proj",
    ("mlp.linear_fc1",),
    "mlp.linear_fc2",
    eps=_NORM_EPS,
    activation="gelu_pytorch_tanh",
)


class Qwen3VLEncoder:
    """The encoder; see `Encoder`. Its rows are an embedding and the deep features, one after the other."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        name = f"{root}visual"
        self._merge_size, size = spec.merge_size, int(hf["hidden_size"])
        self._head_dim = size // int(hf["num_heads"])
        patch = (int(hf["in_channels"]), int(hf["temporal_patch_size"]), *[int(hf["patch_size"])] * 2)
        self._patches = load.replicated(f"{name}.patch_embed.proj.weight", size, *patch).flatten(1)
        self._patch_bias = load.replicated(f"{name}.patch_embed.proj.bias", size)
        num_places = int(hf["num_position_embeddings"])
        self._side = int(num_places**0.5)
        self._places = load.replicated(f"{name}.pos_embed.weight", num_places, size)
        self._layers = [
            EncoderLayer(
                load,
                f"{name}.blocks.{index}",
                _LAYER,
                size,
                int(hf["intermediate_size"]),
                int(hf["num_heads"]),
            )
            for index in range(int(hf["depth"]))
        ]
        self._merger = _Merger(load, f"{name}.merger", spec, size, normalizes_merged=False)
        self._deep = {
            int(layer): _Merger(
                load, f"{name}.deepstack_merger_list.{index}", spec, size, normalizes_merged=True
            )
            for index, layer in enumerate(hf.get("deepstack_visual_indexes") or ())
        }

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image with the deep features, [rows, (1 + D) * E]."""
        patches = tensors["pixel_values"].to(self._patches.dtype)
        frames, rows, columns = tensors["image_grid_thw"].flatten().tolist()
        angles = grid_angles(rows, columns, self._merge_size, self._head_dim, _THETA).repeat(frames, 1)
        angles = angles.to(patches.device)
        rotation = partial(rotate, cos=angles.cos(), sin=angles.sin())
        x = F.linear(patches, self._patches, self._patch_bias)
        x = x + self._positions(rows, columns).repeat(frames, 1)
        deep, runs = list[Tensor](), [(frames, rows * columns)]

        def merge_deep(index: int, output: Tensor) -> None:
            if index in self._deep:
                deep.append(self._deep[index].forward(output))

        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation, merge_deep)
        return torch.cat((self._merger.forward(x), *deep), dim=1)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return the learned positions of patches, [rows * columns, E], between those of the table's grid."""
        side, device = self._side, self._places.device
        row_index, row_share = _between(rows, side)
        column_index, column_share = _between(columns, side)
        index = (row_index[:, None, :, None] * side + column_index[None, :, None, :]).to(device)
        share = (row_share[:, None, :, None] * column_share[None, :, None, :]).to(device)
        found = (self._places[index.flatten(2)] * share.flatten(2)[..., None]).sum(2).to(self._places.dtype)
        return found.flatten(0, 1)[block_order(rows, columns, self._merge_size).to(device)]


class _Merger:
    """Embeddings of merged patches, [N, E] -> [N / merge_size², embedding_size]."""

    def __init__(
        self, load: LoadContext, name: str, spec: VisionSpec, size: int, *, normalizes_merged: bool
    ) -> None:
        merged = size * spec.merge_size**2
        norm_len = merged if normalizes_merged else size
        self._norm: LayerNorm = read_layer_norm(load, f"{name}.norm", norm_len, _NORM_EPS)
        self._norm_len, self._merged = norm_len, merged
        self._inner = read_linear(load, [f"{name}.linear_fc1"], merged, merged)
        self._output = read_linear(load, [f"{name}.linear_fc2"], merged, spec.embedding_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self._norm.apply(x.reshape(-1, self._norm_len)).view(-1, self._merged)
        return self._output.forward(F.gelu(self._inner.forward(normed)))


def _between(length: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the two places of a table of `side` entries around each of `length` points, and their shares, [n, 2]."""
    points = torch.arange(length, dtype=torch.float32) * (side - 1) / max(1, length - 1)
    first = points.floor()
    places = torch.stack((first, first + 1), dim=1)
    shares = (1 - (points[:, None] - places).abs()).clamp(min=0)
    return places.long().clamp(0, side - 1), shares
