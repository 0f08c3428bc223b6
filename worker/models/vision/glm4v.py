"""Encoder of GLM-4V to 4.6V (2025), with learned positions between those of a grid, and of GLM-OCR without them.

That of GLM-5 Next (2026) is GLM-OCR's with clamped activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import clamped_silu_and_mul
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
)

_LAYER = LayerForm(
    ("norm1", "norm2"),
    ("attn.qkv",),
    "attn.proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    norm="rms",
    head_norms=("attn.q_norm", "attn.k_norm"),
)


class Glm4vEncoder:
    """The encoder; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        name, size, merged = f"{root}visual", int(hf["hidden_size"]), spec.embedding_size
        self._merge_size, num_heads = spec.merge_size, int(hf["num_heads"])
        self._head_dim, self._eps = size // num_heads, float(hf["rms_norm_eps"])
        self._theta = float(hf["rope_parameters"]["rope_theta"])
        patch = (int(hf["in_channels"]), int(hf["temporal_patch_size"]), *[int(hf["patch_size"])] * 2)
        self._patches = load.replicated(f"{name}.patch_embed.proj.weight", size, *patch).flatten(1)
        self._patch_bias = load.replicated(f"{name}.patch_embed.proj.bias", size)
        self._places: Tensor | None = None
        is_ocr, bias = bool(hf["is_ocr"]), bool(hf["attention_bias"])
        if not is_ocr:
            self._first_norm = load.norm(f"{name}.post_conv_layernorm", size)
            side = int(hf["image_size"]) // int(hf["patch_size"])
            places = load.replicated(f"{name}.embeddings.position_embedding.weight", side * side, size)
            self._places = places.float().view(1, side, side, size).permute(0, 3, 1, 2)
        form = replace(
            _LAYER,
            eps=self._eps,
            activation=hf["hidden_act"],
            qkv_bias=bias,
            output_bias=bias and is_ocr,
            mlp_bias=bias and is_ocr,
            head_norms=_LAYER.head_norms if is_ocr else (),
            head_norm_len=self._head_dim,
            clamp=hf["clamp"],
        )
        self._layers = [
            EncoderLayer(load, f"{name}.blocks.{index}", form, size, int(hf["layer_inner"]), num_heads)
            for index in range(int(hf["depth"]))
        ]
        self._last_norm = load.norm(f"{name}.post_layernorm", size)
        merger, inner = f"{name}.merger", int(hf["merger_inner"])
        squares = merged, size, self._merge_size, self._merge_size
        # Of a square's patches as one input, patch after patch.
        self._merge = load.replicated(f"{name}.downsample.weight", *squares).permute(0, 2, 3, 1).flatten(1)
        self._merge_bias = load.replicated(f"{name}.downsample.bias", merged)
        self._projection = read_linear(load, [f"{merger}.proj"], merged, merged, bias=False)
        self._merger_norm = read_layer_norm(load, f"{merger}.post_projection_norm", merged, 1e-5)
        gates = [f"{merger}.gate_proj", f"{merger}.up_proj"]
        self._gate_up = read_linear(load, gates, merged, inner, bias=False)
        self._down = read_linear(load, [f"{merger}.down_proj"], inner, merged, bias=False)
        self._activation, self._clamp = ACTIVATIONS[hf["hidden_act"]], form.clamp

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, [rows, E]."""
        patches = tensors["pixel_values"].to(self._patches.dtype)
        frames, rows, columns = tensors["image_grid_thw"].flatten().tolist()
        angles = grid_angles(rows, columns, self._merge_size, self._head_dim, self._theta).repeat(frames, 1)
        angles = angles.to(patches.device)
        rotation = partial(rotate, cos=angles.cos(), sin=angles.sin())
        x = F.linear(patches, self._patches, self._patch_bias)
        if self._places is not None:
            places = self._positions(self._places, rows, columns).to(x.dtype)
            x = rms_norm(x, self._first_norm, self._eps) + places.repeat(frames, 1)
        runs = [(frames, rows * columns)]
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        x = rms_norm(x, self._last_norm, self._eps).view(-1, self._merge.shape[1])
        x = self._projection.forward(F.linear(x, self._merge, self._merge_bias))
        gate_up = self._gate_up.forward(F.gelu(self._merger_norm.apply(x)))
        if self._clamp is not None:
            return self._down.forward(clamped_silu_and_mul(gate_up, *self._clamp))
        gate, up = gate_up.chunk(2, dim=1)
        return self._down.forward(self._activation(gate) * up)

    def _positions(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """Return the learned positions of patches, [rows * columns, E], between those of the table's grid."""
        order = block_order(rows, columns, self._merge_size)
        across, down = (
            (places + 0.5) / length * 2 - 1
            for places, length in ((order % columns, columns), (order // columns, rows))
        )
        points = torch.stack((across, down), dim=1)[None, :, None].to(table.device)
        found = F.grid_sample(table, points, mode="bicubic", padding_mode="border", align_corners=False)
        return found[0, :, :, 0].t()
