"""Encoder of Muse Spark (2026): attention within windows in most layers, learned positions resampled to any grid.

Queries and keys are also rotated by column and row. Squares of patches become one embedding, which has an RMSNorm as
those of tokens have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.vision import VisionSpec
from ..load_context import LoadContext
from .parts import (
    ACTIVATIONS,
    EncoderLayer,
    Encoding,
    LayerForm,
    block_order,
    encode_layers,
    grid_angles,
    read_layer_norm,
    read_linear,
    rotate,
    window_order,
)

_LAYER = LayerForm(
    ("norm1", "norm2"),
    ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.proj",
    ("mlp.fc1",),
    "mlp.fc2",
    eps=1e-5,
)


class MuseSparkEncoder:
    """The encoder with the projector; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        size, num_heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
        tower = f"{root}vision_tower"
        self._merge_size, self._head_dim = spec.merge_size, size // num_heads
        self._theta, self._side = float(hf["rope_parameters"]["rope_theta"]), int(hf["pos_emb_height"])
        patch_len = int(hf["patch_temporal"]) * 3 * int(hf["patch_size"]) ** 2
        embedder = f"{tower}.patch_embedder"
        self._patches = read_linear(load, [f"{embedder}.patch_embedding"], patch_len, size, bias=False)
        places = load.replicated(f"{embedder}.position_embedding_table.weight", self._side**2, size)
        self._places = places.float().view(1, self._side, self._side, size).permute(0, 3, 1, 2)
        form, eps = replace(_LAYER, activation=hf["hidden_act"]), float(hf["layer_norm_eps"])
        self._first_norm, self._last_norm = (
            read_layer_norm(load, f"{tower}.ln_{name}", size, eps) for name in ("pre", "post")
        )
        self._whole_layers = frozenset(hf["fullatt_block_indexes"])
        self._layers = [
            EncoderLayer(load, f"{tower}.layers.{index}", form, size, int(hf["intermediate_size"]), num_heads)
            for index in range(int(hf["num_hidden_layers"]))
        ]
        merged, inner = size * self._merge_size**2, int(hf["projector_hidden_size"])
        self._activation = ACTIVATIONS[hf["projector_hidden_act"]]
        self._adapter = [
            read_linear(load, [f"{root}vision_adapter.{name}"], inputs, inner, bias=False)
            for name, inputs in (("fc1", merged), ("fc2", inner))
        ]
        self._output = read_linear(load, [f"{root}vision_projection"], inner, spec.embedding_size, bias=False)
        self._ones, self._eps = load.empty(spec.embedding_size).fill_(1), float(hf["embedding_norm_eps"])

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, row by row, [rows, E]."""
        patches = tensors["pixel_values"].to(self._ones.dtype)
        frames, rows, columns = tensors["image_grid_thw"].flatten().tolist()
        if frames != 1:
            raise ValueError(f"an image has {frames} frames, must have one")
        x = self._patches.forward(patches)
        x = self._first_norm.apply(x + self._positions(rows, columns).to(x.dtype))
        order, windows = window_order(1, rows, columns, self._side)
        by_row, by_column = grid_angles(rows, columns, 1, self._head_dim, self._theta, first=1).chunk(
            2, dim=1
        )
        angles = torch.cat((by_column, by_row), dim=1)[order].to(x.device)
        rotation = partial(rotate, cos=angles.cos(), sin=angles.sin())
        order, whole = order.to(x.device), [(1, len(x))]
        x = yield from encode_layers(
            self._layers,
            x[order],
            lambda index: whole if index in self._whole_layers else windows,
            rotation,
        )
        x = self._last_norm.apply(torch.empty_like(x).index_copy_(0, order, x))
        squares = x[block_order(rows, columns, self._merge_size).to(x.device)]
        x = squares.unflatten(0, (-1, self._merge_size**2)).transpose(1, 2).flatten(1)
        for layer in self._adapter:
            x = self._activation(layer.forward(x))
        return rms_norm(self._output.forward(x), self._ones, self._eps)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return the learned positions of patches, [rows * columns, E].

        The model was trained with those of a grid with as many rows as the image has columns, one by one.
        """
        down, right = (
            (2 * torch.arange(length, dtype=torch.float32) + 1) / length - 1 for length in (columns, rows)
        )
        grid = torch.stack(torch.meshgrid(right, down, indexing="xy"), dim=-1).to(self._places.device)
        found = F.grid_sample(self._places, grid[None], mode="bilinear", align_corners=False)
        return found[0].flatten(1).t()
