"""Encoder of Pixtral (Agrawal et al., 2024) with the projector of Mistral Small 3.1: one embedding for each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.vision import VisionSpec
from ..load_context import LoadContext
from .parts import ACTIVATIONS, attend_within, read_linear, rotate

_NORM_EPS = 1e-5


class PixtralEncoder:
    """The encoder with the projector; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        tower, projector = f"{root}vision_tower", f"{root}multi_modal_projector"
        size, self._patch_size = int(hf["hidden_size"]), int(hf["patch_size"])
        self._merge_size = spec.merge_size
        head_dim = size // int(hf["num_attention_heads"])
        theta = float(hf["rope_parameters"]["rope_theta"])
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._row_frequencies, self._column_frequencies = frequencies[0::2], frequencies[1::2]
        shape = (size, int(hf["num_channels"]), self._patch_size, self._patch_size)
        self._patches = load.replicated(f"{tower}.patch_conv.weight", *shape)
        self._norm = load.norm(f"{tower}.ln_pre", size)
        self._layers = [
            _Layer(load, f"{tower}.transformer.layers.{index}", hf)
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self._last_norm, self._eps = load.norm(f"{projector}.norm", size), float(hf["projector_norm_eps"])
        merged, bias = size * self._merge_size**2, bool(hf["projector_bias"])
        self._merge = read_linear(load, [f"{projector}.patch_merger.merging_layer"], merged, size, bias=False)
        self._inner = read_linear(load, [f"{projector}.linear_1"], size, spec.embedding_size, bias=bias)
        self._output = read_linear(
            load, [f"{projector}.linear_2"], spec.embedding_size, spec.embedding_size, bias=bias
        )
        self._activation = ACTIVATIONS[hf["projector_hidden_act"]]

    def encode(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image, row by row, [rows, E]."""
        height, width = tensors["image_sizes"].flatten().tolist()
        pixels = tensors["pixel_values"].to(self._patches.dtype)
        pixels = pixels.view(1, *pixels.shape[-3:])[..., :height, :width]
        x = F.conv2d(pixels, self._patches, stride=self._patch_size)[0]
        rows, columns = x.shape[1:]
        angles = torch.cat(
            (
                (torch.arange(rows)[:, None] * self._row_frequencies).repeat_interleave(columns, 0),
                (torch.arange(columns)[:, None] * self._column_frequencies).repeat(rows, 1),
            ),
            dim=1,
        ).to(x.device)
        cos, sin = angles.cos(), angles.sin()
        x = rms_norm(x.flatten(1).t().contiguous(), self._norm, _NORM_EPS)
        for layer in self._layers:
            x = layer.forward(x, cos, sin)
        x = rms_norm(x, self._last_norm, self._eps)
        side, size = self._merge_size, x.shape[1]
        blocks = x.view(rows // side, side, columns // side, side, size).permute(0, 2, 4, 1, 3)
        merged = self._merge.forward(blocks.reshape(-1, size * side * side))
        return self._output.forward(self._activation(self._inner.forward(merged)))


class _Layer:
    """Attention and a gated feed-forward network, each after an RMSNorm and added to the residual."""

    def __init__(self, load: LoadContext, name: str, hf: Mapping[str, Any]) -> None:
        size, inner = int(hf["hidden_size"]), int(hf["intermediate_size"])
        self._num_heads = int(hf["num_attention_heads"])
        self._scale = (size // self._num_heads) ** -0.5
        self._norms = [load.norm(f"{name}.{norm}", size) for norm in ("attention_norm", "ffn_norm")]
        names = [f"{name}.attention.{part}_proj" for part in "qkv"]
        self._qkv = read_linear(load, names, size, size, bias=False)
        self._proj = read_linear(load, [f"{name}.attention.o_proj"], size, size, bias=False)
        names = [f"{name}.feed_forward.{part}_proj" for part in ("gate", "up")]
        self._gate_up = read_linear(load, names, size, inner, bias=False)
        self._down = read_linear(load, [f"{name}.feed_forward.down_proj"], inner, size, bias=False)
        self._activation = ACTIVATIONS[hf["hidden_act"]]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, E] -> [N, E]."""
        projected = self._qkv.forward(rms_norm(x, self._norms[0], _NORM_EPS))
        q, k, v = projected.view(len(x), 3, self._num_heads, -1).unbind(1)
        attended = attend_within(rotate(q, cos, sin), rotate(k, cos, sin), v, [(1, len(x))], self._scale)
        x = x + self._proj.forward(attended.flatten(1))
        gate, up = self._gate_up.forward(rms_norm(x, self._norms[1], _NORM_EPS)).chunk(2, dim=1)
        return x + self._down.forward(self._activation(gate) * up)
