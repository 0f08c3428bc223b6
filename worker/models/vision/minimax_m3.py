"""Encoder of MiniMax-M3: patches of any grid, whose time, row and column rotate a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....proto.vision import VisionSpec
from ..load_context import LoadContext
from .parts import (
    EncoderLayer,
    Encoding,
    LayerForm,
    block_order,
    encode_layers,
    read_layer_norm,
    read_linear,
    rotate,
)

_LAYER = LayerForm(
    ("layer_norm1", "layer_norm2"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj",
    ("mlp.fc1",),
    "mlp.fc2",
)


class MiniMaxM3Encoder:
    """The encoder with its two projectors, of patches and of squares of them; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        tower, size = f"{root}vision_tower.vision_model", int(hf["hidden_size"])
        num_heads, self._merge_size = int(hf["num_attention_heads"]), spec.merge_size
        form = replace(_LAYER, eps=float(hf["layer_norm_eps"]), activation=hf["hidden_act"])
        # Time, row and column each rotate as many elements of a head; the others are not rotated.
        per_axis = 2 * (size // num_heads // 3 // 2)
        places = torch.arange(0, per_axis, 2, dtype=torch.float32)
        self._frequencies = float(hf["rope_parameters"]["rope_theta"]) ** -(places / per_axis)
        patch = int(hf["num_channels"]), int(hf["temporal_patch_size"]), *[int(hf["patch_size"])] * 2
        self._patches = load.replicated(f"{tower}.embeddings.patch_embedding.weight", size, *patch).flatten(1)
        self._first_norm = read_layer_norm(load, f"{tower}.pre_layrnorm", size, form.eps)
        inner = int(hf["intermediate_size"])
        self._layers = [
            EncoderLayer(load, f"{tower}.encoder.layers.{index}", form, size, inner, num_heads)
            for index in range(int(hf["num_hidden_layers"]))
        ]
        width, merged = int(hf["projector_size"]), spec.embedding_size * self._merge_size**2
        self._projectors = [
            (
                read_linear(load, [f"{root}{name}.linear_1"], in_features, width),
                read_linear(load, [f"{root}{name}.linear_2"], width, spec.embedding_size),
            )
            for name, in_features in (("multi_modal_projector", size), ("patch_merge_mlp", merged))
        ]

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, square by square, [rows, E]."""
        patches = tensors["pixel_values"].to(self._patches.dtype)
        frames, rows, columns = tensors["image_grid_thw"].flatten().tolist()
        if frames != 1:
            raise ValueError(f"an image has {frames} frames, must have one")
        angles = self._angles(rows, columns).to(patches.device)
        rotation = partial(_rotate_first, cos=angles.cos(), sin=angles.sin())
        x = self._first_norm.apply(F.linear(patches, self._patches))
        runs = [(1, len(x))]
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        for inner, output in self._projectors:
            x = output.forward(F.gelu(inner.forward(x)))
            if len(x) == rows * columns:
                x = x.reshape(len(x) // self._merge_size**2, -1)
        return x

    def _angles(self, rows: int, columns: int) -> Tensor:
        """Return the angles of each patch, by time, which is 0, by row and by column."""
        order = block_order(rows, columns, self._merge_size)
        places = torch.stack((torch.zeros_like(order), order // columns, order % columns), dim=1)
        return (places[:, :, None] * self._frequencies).flatten(1)


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of heads [N, H, D] by angles [N, n], and leave those after 2 n."""
    num_rotated = 2 * cos.shape[1]
    return torch.cat((rotate(x[..., :num_rotated], cos, sin), x[..., num_rotated:]), dim=-1)
