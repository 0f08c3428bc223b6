"""Encoder of Pixtral (Agrawal et al., 2024), also with the projector of Mistral Small 3.1, which merges patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.norm import rms_norm
from ....proto.vision import VisionSpec
from ..layers import ColumnParallelLinear
from ..load_context import LoadContext
from .parts import ACTIVATIONS, EncoderLayer, Encoding, LayerForm, encode_layers, read_linear, rotate

_NORM_EPS = 1e-5
_LAYER = LayerForm(
    ("attention_norm", "ffn_norm"),
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.o_proj",
    ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "feed_forward.down_proj",
    norm="rms",
    eps=_NORM_EPS,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a checkpoint's modules.

    Attributes:
        norm, merger, inner, output: of the projector.
    """

    tower: str = "vision_tower"
    norm: str = "multi_modal_projector.norm"
    merger: str = "multi_modal_projector.patch_merger.merging_layer"
    inner: str = "multi_modal_projector.linear_1"
    output: str = "multi_modal_projector.linear_2"
    layer: LayerForm = _LAYER


_HUGGING_FACE = Names()
# Those of Mistral's own format.
MISTRAL_LARGE_4 = Names(
    "vision_encoder",
    "pre_mm_projector_norm",
    "patch_merger.merging_layer",
    "vision_language_adapter.w_in",
    "vision_language_adapter.w_out",
    replace(
        _LAYER,
        qkv=("attention.wq", "attention.wk", "attention.wv"),
        output="attention.wo",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        interleaved=True,
    ),
)


class PixtralEncoder:
    """The encoder with the projector; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str, names: Names = _HUGGING_FACE) -> None:
        hf: Mapping[str, Any] = spec.hf
        tower = f"{root}{names.tower}"
        size, self._patch_size = int(hf["hidden_size"]), int(hf["patch_size"])
        self._merge_size = spec.merge_size
        num_heads = int(hf["num_attention_heads"])
        head_dim, form = size // num_heads, replace(names.layer, activation=hf["hidden_act"])
        theta = float(hf["rope_parameters"]["rope_theta"])
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._row_frequencies, self._column_frequencies = frequencies[0::2], frequencies[1::2]
        shape = (size, int(hf["num_channels"]), self._patch_size, self._patch_size)
        self._patches = load.replicated(f"{tower}.patch_conv.weight", *shape)
        self._norm = load.norm(f"{tower}.ln_pre", size)
        self._layers = [
            EncoderLayer(
                load,
                f"{tower}.transformer.layers.{index}",
                form,
                size,
                int(hf["intermediate_size"]),
                num_heads,
            )
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self._merge: ColumnParallelLinear | None = None
        if hf["has_merger"]:
            self._last_norm = load.norm(f"{root}{names.norm}", size)
            self._eps, merged = float(hf["projector_norm_eps"]), size * self._merge_size**2
            self._merge = read_linear(load, [f"{root}{names.merger}"], merged, size, bias=False)
        bias = bool(hf["projector_bias"])
        self._inner = read_linear(load, [f"{root}{names.inner}"], size, spec.embedding_size, bias=bias)
        self._output = read_linear(
            load, [f"{root}{names.output}"], spec.embedding_size, spec.embedding_size, bias=bias
        )
        self._activation = ACTIVATIONS[hf["projector_hidden_act"]]

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
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
        rotation = partial(rotate, cos=angles.cos(), sin=angles.sin())
        x = rms_norm(x.flatten(1).t().contiguous(), self._norm, _NORM_EPS)
        runs = [(1, len(x))]
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        if self._merge is not None:
            x = rms_norm(x, self._last_norm, self._eps)
            side, size = self._merge_size, x.shape[1]
            blocks = x.view(rows // side, side, columns // side, side, size).permute(0, 2, 4, 1, 3)
            x = self._merge.forward(blocks.reshape(-1, size * side * side))
        return self._output.forward(self._activation(self._inner.forward(x)))
