"""Encoder of Qwen2.5-VL (Bai et al., 2025): attention within windows in most layers, embeddings of 2 x 2 patches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.vision import VisionSpec
from ..load_context import LoadContext
from .parts import (
    EncoderLayer,
    Encoding,
    LayerForm,
    encode_layers,
    grid_angles,
    read_linear,
    rotate,
    window_order,
)

_NORM_EPS = 1e-6
_THETA = 10000.0
_LAYER = LayerForm(
    ("norm1", "norm2"),
    ("attn.qkv",),
    "attn.proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    norm="rms",
    eps=_NORM_EPS,
    activation="silu",
)


class Qwen2_5VLEncoder:
    """The encoder; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        name = f"{root}visual"
        self._merge_size, size = spec.merge_size, int(hf["hidden_size"])
        num_heads = int(hf["num_heads"])
        self._head_dim = size // num_heads
        # Embeddings on a side of a window.
        self._window = int(hf["window_size"]) // self._merge_size // int(hf["patch_size"])
        self._whole_layers = frozenset(hf["fullatt_block_indexes"])
        patch = (int(hf["in_channels"]), int(hf["temporal_patch_size"]), *[int(hf["patch_size"])] * 2)
        self._patches = load.replicated(f"{name}.patch_embed.proj.weight", size, *patch).flatten(1)
        self._layers = [
            EncoderLayer(
                load, f"{name}.blocks.{index}", _LAYER, size, int(hf["intermediate_size"]), num_heads
            )
            for index in range(int(hf["depth"]))
        ]
        merged = size * self._merge_size**2
        self._norm = load.norm(f"{name}.merger.ln_q", size)
        self._inner = read_linear(load, [f"{name}.merger.mlp.0"], merged, merged)
        self._output = read_linear(load, [f"{name}.merger.mlp.2"], merged, spec.embedding_size)

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, [rows, E]; its frames are attended to one by one."""
        patches = tensors["pixel_values"].to(self._patches.dtype)
        frames, rows, columns = tensors["image_grid_thw"].flatten().tolist()
        order, windows = window_order(
            frames, rows // self._merge_size, columns // self._merge_size, self._window
        )
        order = order.to(patches.device)
        unit = self._merge_size**2
        angles = grid_angles(rows, columns, self._merge_size, self._head_dim, _THETA).repeat(frames, 1)
        angles = angles.view(-1, unit, angles.shape[1])[order.cpu()].flatten(0, 1).to(patches.device)
        rotation = partial(rotate, cos=angles.cos(), sin=angles.sin())
        x = F.linear(patches, self._patches)
        x = x.view(-1, unit, x.shape[1])[order].flatten(0, 1)
        in_windows = [(count, length * unit) for count, length in windows]
        # The windows of a frame follow each other, so that each frame is one run for the layers without windows.
        whole = [(frames, rows * columns)]
        x = yield from encode_layers(
            self._layers, x, lambda index: whole if index in self._whole_layers else in_windows, rotation
        )
        x = rms_norm(x, self._norm, _NORM_EPS).view(len(order), -1)
        x = self._output.forward(F.gelu(self._inner.forward(x)))
        return torch.empty_like(x).index_copy_(0, order, x)
