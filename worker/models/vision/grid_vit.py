"""Vision transformers whose learned positions are resampled to any grid of patches: PaddleOCR-VL and Kimi K2.5.

Queries and keys are also rotated by row and column. Squares of patches become one embedding by two linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    encode_layers,
    grid_angles,
    read_layer_norm,
    read_linear,
    rotate,
    rotate_pairs,
)

_PROJECTOR_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class GridForm:
    """Form of a family's encoder, and the names of its modules in published checkpoints.

    Attributes:
        patches: the convolution of patches.
        positions: tensor of the learned positions.
        resampling: of the positions, a mode of torch's `interpolate`.
        projector: modules of the norm of patches and of the two linear layers.
        rotates_pairs: neighbors in a head are rotated together, in turn by column and by row; otherwise elements that
            are half a head apart, first those by row, then those by column.
    """

    patches: str
    positions: str
    resampling: str
    layers: str
    layer: LayerForm
    last_norm: str
    projector: tuple[str, str, str]
    rotates_pairs: bool = False


_TOWER = "visual.vision_model."
PADDLE_OCR = GridForm(
    f"{_TOWER}embeddings.patch_embedding",
    f"{_TOWER}embeddings.position_embedding.weight",
    "bilinear",
    f"{_TOWER}encoder.layers",
    LayerForm(
        ("layer_norm1", "layer_norm2"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out_proj",
        ("mlp.fc1",),
        "mlp.fc2",
    ),
    f"{_TOWER}post_layernorm",
    ("mlp_AR.pre_norm", "mlp_AR.linear_1", "mlp_AR.linear_2"),
)
KIMI_K25 = GridForm(
    "vision_tower.patch_embed.proj",
    "vision_tower.patch_embed.pos_emb.weight",
    "bicubic",
    "vision_tower.encoder.blocks",
    LayerForm(("norm0", "norm1"), ("wqkv",), "wo", ("mlp.fc0",), "mlp.fc1", eps=1e-5),
    "vision_tower.encoder.final_layernorm",
    ("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"),
    rotates_pairs=True,
)


class GridVitEncoder:
    """The encoder with the projector; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str, form: GridForm) -> None:
        hf: Mapping[str, Any] = spec.hf
        size, num_heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
        self._merge_size, self._head_dim = spec.merge_size, size // num_heads
        self._theta, self._form = float(hf["rope_parameters"]["rope_theta"]), form
        patch = int(hf.get("num_channels", 3)), *[int(hf["patch_size"])] * 2
        self._patches = load.replicated(f"{root}{form.patches}.weight", size, *patch).flatten(1)
        self._patch_bias = load.replicated(f"{root}{form.patches}.bias", size)
        places = load.replicated(f"{root}{form.positions}", *load.checkpoint.shape_of(root + form.positions))
        sides = places.shape[:-1] if places.dim() == 3 else [int(len(places) ** 0.5)] * 2
        self._places = places.float().view(1, *sides, size).permute(0, 3, 1, 2)
        layer = replace(
            form.layer,
            eps=float(hf.get("layer_norm_eps", form.layer.eps)),
            activation=hf["hidden_act"],
        )
        self._layers = [
            EncoderLayer(
                load, f"{root}{form.layers}.{index}", layer, size, int(hf["intermediate_size"]), num_heads
            )
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self._last_norm = read_layer_norm(load, root + form.last_norm, size, layer.eps)
        norm, inner, output = (root + name for name in form.projector)
        merged = size * self._merge_size**2
        self._norm = read_layer_norm(load, norm, size, float(hf.get("projector_eps", _PROJECTOR_EPS)))
        self._inner = read_linear(load, [inner], merged, merged)
        self._output = read_linear(load, [output], merged, spec.embedding_size)

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, row by row, [rows, E]."""
        patches = tensors["pixel_values"].flatten(1).to(self._patches.dtype)
        frames, rows, columns = tensors["image_grid_thw"].flatten().tolist()
        if frames != 1:
            raise ValueError(f"an image has {frames} frames, must have one")
        x = F.linear(patches, self._patches, self._patch_bias)
        places = F.interpolate(self._places, (rows, columns), mode=self._form.resampling)
        x = x + places[0].flatten(1).t().to(x.dtype)
        runs = [(1, len(x))]
        rotation = self._rotation(rows, columns, x.device)
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        x = self._norm.apply(self._last_norm.apply(x))
        side, size = self._merge_size, x.shape[1]
        squares = x.view(rows // side, side, columns // side, side, size).transpose(1, 2)
        return self._output.forward(F.gelu(self._inner.forward(squares.reshape(-1, side * side * size))))

    def _rotation(self, rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
        angles = grid_angles(rows, columns, 1, self._head_dim, self._theta)
        if self._form.rotates_pairs:
            angles = angles.view(len(angles), 2, -1).flip(1).transpose(1, 2).flatten(1)
        angles = angles.to(device)
        return partial(
            rotate_pairs if self._form.rotates_pairs else rotate, cos=angles.cos(), sin=angles.sin()
        )
