"""Encoder of Gemma 4 (2026): patches of any grid, with tables of positions for rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.vision import VisionSpec
from ..load_context import LoadContext
from .parts import EncoderLayer, Encoding, LayerForm, encode_layers, read_linear, rotate

_LAYER = LayerForm(
    ("input_layernorm", "pre_feedforward_layernorm"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    norm="rms",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    after=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    normalizes_values=True,
    scale=1.0,
)


class Gemma4Encoder:
    """The encoder with the projection; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf: Mapping[str, Any] = spec.hf
        tower, size = f"{root}vision_tower", int(hf["hidden_size"])
        self._eps, self._size, self._side = float(hf["rms_norm_eps"]), size, spec.merge_size
        self._head_dim = int(hf["head_dim"])
        form = replace(
            _LAYER,
            eps=self._eps,
            activation=hf["hidden_activation"],
            head_norm_len=self._head_dim,
            clips=bool(hf["use_clipped_linears"]),
            suffix="" if hf["use_clipped_linears"] else ".linear",
        )
        half = self._head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self._frequencies = float(hf["rope_parameters"]["rope_theta"]) ** -exponents
        patch_len, num_places = 3 * int(hf["patch_size"]) ** 2, int(hf["position_embedding_size"])
        self._patches = read_linear(load, [f"{tower}.patch_embedder.input_proj"], patch_len, size, bias=False)
        places = load.replicated(f"{tower}.patch_embedder.position_embedding_table", 2, num_places, size)
        self._columns, self._rows = places
        self._layers = [
            EncoderLayer(
                load,
                f"{tower}.encoder.layers.{index}",
                form,
                size,
                int(hf["intermediate_size"]),
                int(hf["num_attention_heads"]),
                self._head_dim,
            )
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self._standard: tuple[Tensor, Tensor] | None = None
        if hf["standardize"]:
            bias, scale = (load.replicated(f"{tower}.std_{name}", size).float() for name in ("bias", "scale"))
            self._standard = bias, scale
        self._ones = load.empty(size).fill_(1)
        self._projection = read_linear(
            load, [f"{root}embed_vision.embedding_projection"], size, spec.embedding_size, bias=False
        )

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, [rows, E]; its patches are padded at the end."""
        places = tensors["image_position_ids"].reshape(-1, 2)
        is_patch = (places != -1).all(dim=1)
        places = places[is_patch]
        patches = tensors["pixel_values"].flatten(0, 1)[is_patch]
        x = self._patches.forward((2 * (patches - 0.5)).to(self._columns.dtype))
        x = x + (self._columns[places[:, 0]] + self._rows[places[:, 1]])
        angles = places[:, :, None].float() * self._frequencies.to(x.device)  # [N, 2, D / 4]
        cos, sin = angles.cos(), angles.sin()

        def rotation(heads: Tensor) -> Tensor:
            halves = heads.chunk(2, dim=-1)
            parts = [rotate(half, cos[:, axis], sin[:, axis]) for axis, half in enumerate(halves)]
            return torch.cat(parts, dim=-1)

        runs = [(1, len(x))]
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        columns, rows = (places.amax(0) + 1).tolist()
        grid = x.float().t().reshape(1, self._size, rows, columns)
        pooled = F.avg_pool2d(grid, self._side).flatten(2)[0].t().to(x.dtype).float() * self._size**0.5
        if self._standard is not None:
            bias, scale = self._standard
            pooled = (pooled - bias) * scale
        normed = rms_norm(pooled.to(x.dtype).contiguous(), self._ones, self._eps)
        return self._projection.forward(normed)
