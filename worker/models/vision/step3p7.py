"""Encoder of Step 3.7 (2026): a vision transformer whose learned positions are resampled to each tile.

Queries and keys are also rotated by row and column. Two convolutions leave a sixteenth of the patches as embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ....proto.vision import VisionSpec
from ..load_context import LoadContext
from .parts import (
    EncoderLayer,
    Encoding,
    LayerForm,
    encode_layers,
    encode_views,
    grid_angles,
    read_layer_norm,
    read_linear,
    rotate_pairs,
)

_LAYER = LayerForm(
    ("ln_1", "ln_2"),
    ("attn.in_proj",),
    "attn.out_proj",
    ("mlp.c_fc",),
    "mlp.c_proj",
    factors=("ls_1.gamma", "ls_2.gamma"),
)


class Step3p7Encoder:
    """The encoder with the projector; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf, tower = spec.hf, f"{root}vision_model"
        for name in load.checkpoint.names():
            if name.startswith(tower) and ".attn.in_proj_" in name:
                load.checkpoint.rename(name, name.replace(".in_proj_", ".in_proj."))
        size, num_heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
        self._patch, self._head_dim = int(hf["patch_size"]), size // num_heads
        self._theta = float(hf["rope_parameters"]["rope_theta"])
        form = replace(_LAYER, eps=float(hf["layer_norm_eps"]), activation=hf["hidden_act"])
        self._patches = load.replicated(
            f"{tower}.conv1.weight", size, int(hf["num_channels"]), self._patch, self._patch
        )
        side = int(hf["image_size"]) // self._patch
        places = load.replicated(f"{tower}.positional_embedding", side**2, size)
        self._places = places.float().view(1, side, side, size).permute(0, 3, 1, 2)
        self._first_norm = read_layer_norm(load, f"{tower}.ln_pre", size, form.eps)
        self._layers = [
            EncoderLayer(
                load,
                f"{tower}.transformer.resblocks.{index}",
                form,
                size,
                int(hf["intermediate_size"]),
                num_heads,
            )
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self._halve = [
            (
                load.replicated(f"{tower}.vit_downsampler{number}.weight", 2 * inputs, inputs, 3, 3),
                load.replicated(f"{tower}.vit_downsampler{number}.bias", 2 * inputs),
            )
            for number, inputs in ((1, size), (2, 2 * size))
        ]
        self._output = read_linear(
            load,
            [f"{root}vit_large_projector"],
            4 * size,
            spec.embedding_size,
            bias=bool(hf["projector_bias"]),
        )

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, those of its tiles before those of the whole, [rows, E]."""
        return (yield from encode_views(tensors, self._encode_tiles))

    def _encode_tiles(self, pixels: Tensor) -> Encoding:
        """[tiles, C, H, W] -> [rows, E]."""
        x = F.conv2d(pixels.to(self._patches.dtype), self._patches, stride=self._patch)
        count, size, rows, columns = x.shape
        places = F.interpolate(self._places, (rows, columns), mode="bilinear", align_corners=False)
        x = (x + places.to(x.dtype)).flatten(2).transpose(1, 2).flatten(0, 1)
        x = self._first_norm.apply(x)
        by_row, by_column = grid_angles(rows, columns, 1, self._head_dim, self._theta).chunk(2, dim=1)
        angles = torch.cat((by_column, by_row), dim=1).repeat(count, 1).to(x.device)
        rotation = partial(rotate_pairs, cos=angles.cos(), sin=angles.sin())
        runs = [(count, rows * columns)]
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        x = x.view(count, rows, columns, size).permute(0, 3, 1, 2)
        for weight, bias in self._halve:
            x = F.conv2d(x, weight, bias, stride=2, padding=1)
        return self._output.forward(x.flatten(2).transpose(1, 2).flatten(0, 1))
