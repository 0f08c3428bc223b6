"""Encoder of DeepSeek-OCR 2 (2026): SAM's vision transformer, then layers in which learned queries read its patches.

SAM (Kirillov et al., 2023) attends within windows in most layers, and adds learned numbers of the distances of rows
and columns to the scores. Patches attend to each other in the second part, queries to all patches and to the queries
before them; the queries' outputs are the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
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
    Pieces,
    Runs,
    as_part,
    encode_layers,
    encode_views,
    read_layer_norm,
    read_linear,
    rotate,
)

_SAM_LAYER = LayerForm(
    ("norm1", "norm2"), ("attn.qkv",), "attn.proj", ("mlp.lin1",), "mlp.lin2", activation="gelu"
)
_QUERY_LAYER = LayerForm(
    ("input_layernorm", "post_attention_layernorm"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    norm="rms",
    output_bias=False,
    mlp_bias=False,
)
_NECK_EPS = 1e-6


class DeepseekOcr2Encoder:
    """The encoder with the projector; see `Encoder`."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        self._patches = _Sam(load, spec.hf, f"{root}sam_model")
        self._queries = _QueryEncoder(load, spec.hf["encoder_config"], f"{root}qwen2_model")
        size = int(spec.hf["encoder_config"]["hidden_size"])
        self._output = read_linear(load, [f"{root}projector.layers"], size, spec.embedding_size)
        self._end = load.replicated(f"{root}view_seperator", spec.embedding_size)

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, those of its tiles before those of the whole, [rows, E]."""
        views = yield from encode_views(tensors, self._encode_tiles)
        return torch.cat((views, self._end[None]))

    def _encode_tiles(self, pixels: Tensor) -> Encoding:
        """[tiles, C, H, W] -> [tiles * queries, E]."""
        work = self._patches.num_parameters, self._queries.num_parameters / 8  # of that many fewer tokens
        share = work[0] / sum(work)
        x = yield from as_part(self._patches.forward(pixels), 0.0, share)
        x = yield from as_part(self._queries.forward(x), share, 1 - share)
        return self._output.forward(x.flatten(0, 1))


class SamLayer(EncoderLayer):
    """A layer of SAM, whose runs are square tiles.

    Args:
        window: rows and columns of patches that attend to each other; 0 for all of a tile.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        form: LayerForm,
        size: int,
        inner: int,
        num_heads: int,
        window: int,
    ) -> None:
        super().__init__(load, name, form, size, inner, num_heads)
        self._window = window
        self._distances = [
            load.replicated(own, *load.checkpoint.shape_of(own))
            for own in (f"{name}.attn.rel_pos_h", f"{name}.attn.rel_pos_w")
        ]

    def work(self, num_tokens: int, runs: Runs) -> int:
        """See EncoderLayer.work."""
        return super().work(num_tokens, [self._within(*run) for run in runs])

    def forward(self, x: Tensor, runs: Runs, rotation: object = None, mask: object = None) -> Pieces:
        """See EncoderLayer.forward; has neither a rotation nor a mask."""
        (tiles,) = runs
        within = self._within(*tiles)
        q, k, v = self._project(self._to_windows(self._norms[0](x), tiles))
        yield self._linear_work(len(x), 0)
        by_row, by_column = self._biases(q, within)
        attended = yield from self._attend(q, k, v, [within], partial(_add, by_row, by_column))
        return (yield from self._finish(x, self._from_windows(attended, tiles)))

    def _within(self, count: int, length: int) -> tuple[int, int]:
        """Return the windows of a number of tiles."""
        if not self._window:
            return count, length
        return count * (-(-isqrt(length) // self._window)) ** 2, self._window**2

    def _to_windows(self, x: Tensor, tiles: tuple[int, int]) -> Tensor:
        """Return the patches of one window after the other, with zeros where a window exceeds its tile."""
        if not self._window:
            return x
        (count, length), own = tiles, self._window
        side, size = isqrt(length), x.shape[1]
        missing = -side % own
        x = F.pad(x.view(count, side, side, size), (0, 0, 0, missing, 0, missing))
        num = (side + missing) // own
        return x.view(count, num, own, num, own, size).transpose(2, 3).reshape(-1, size)

    def _from_windows(self, x: Tensor, tiles: tuple[int, int]) -> Tensor:
        if not self._window:
            return x
        (count, length), own = tiles, self._window
        side, size = isqrt(length), x.shape[1]
        num = -(-side // own)
        grid = x.view(count, num, num, own, own, size).transpose(2, 3).reshape(count, num * own, -1, size)
        return grid[:, :side, :side].reshape(-1, size)

    def _biases(self, q: Tensor, within: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return what is added to scores by the rows and by the columns of keys, [runs, H, queries, side] each."""
        count, length = within
        side = isqrt(length)
        grid = q.view(count, side, side, *q.shape[1:])
        rows, columns = (_by_distance(each, side) for each in self._distances)
        by_row = torch.einsum("nijhd,ikd->nhijk", grid, rows)
        by_column = torch.einsum("nijhd,jkd->nhijk", grid, columns)
        return by_row.flatten(2, 3), by_column.flatten(2, 3)


def _by_distance(distances: Tensor, side: int) -> Tensor:
    """Return the vector of each pair of a query's and a key's row or column, [side, side, D].

    Args:
        distances: [2 * stored side - 1, D], which are resampled to another side.
    """
    resampled = F.interpolate(distances.t()[None], size=2 * side - 1, mode="linear")[0].t()
    places = torch.arange(side, device=distances.device)
    return resampled[places[:, None] - places + side - 1]


def _add(by_row: Tensor, by_column: Tensor, runs: slice, queries: slice) -> Tensor:
    """Return the addends of the scores of some queries; see parts.Bias."""
    rows, columns = by_row[runs, :, queries], by_column[runs, :, queries]
    return (rows[..., :, None] + columns[..., None, :]).flatten(3)


class _Sam:
    """SAM's vision transformer, with convolutions behind it that leave a sixteenth of its patches."""

    def __init__(self, load: LoadContext, hf: Mapping[str, Any], name: str) -> None:
        size, self._patch = int(hf["hidden_size"]), int(hf["patch_size"])
        form = replace(
            _SAM_LAYER,
            eps=float(hf["layer_norm_eps"]),
            activation=hf["hidden_act"],
            qkv_bias=bool(hf["qkv_bias"]),
        )
        inner, num_heads = int(hf["mlp_dim"]), int(hf["num_attention_heads"])
        side = int(hf["image_size"]) // self._patch
        self._patches = load.replicated(
            f"{name}.patch_embed.proj.weight", size, int(hf["num_channels"]), self._patch, self._patch
        )
        self._patch_bias = load.replicated(f"{name}.patch_embed.proj.bias", size)
        self._places = load.replicated(f"{name}.pos_embed", 1, side, side, size)
        self._layers = [
            SamLayer(
                load,
                f"{name}.blocks.{index}",
                form,
                size,
                inner,
                num_heads,
                0 if index in hf["global_attn_indexes"] else int(hf["window_size"]),
            )
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self.num_parameters = len(self._layers) * size * (4 * size + 2 * inner)
        channels = int(hf["output_channels"])
        first, last = map(int, hf["downsample_channels"])
        self._narrow = load.replicated(f"{name}.neck.0.weight", channels, size, 1, 1)
        self._smooth = load.replicated(f"{name}.neck.2.weight", channels, channels, 3, 3)
        self._norms = [read_layer_norm(load, f"{name}.neck.{index}", channels, _NECK_EPS) for index in (1, 3)]
        self._halve = [
            load.replicated(f"{name}.net_2.weight", first, channels, 3, 3),
            load.replicated(f"{name}.net_3.weight", last, first, 3, 3),
        ]

    def forward(self, pixels: Tensor) -> Encoding:
        """[tiles, C, H, W] -> [tiles, patches, E of the queries]."""
        x = F.conv2d(pixels.to(self._patches.dtype), self._patches, self._patch_bias, stride=self._patch)
        x = x.permute(0, 2, 3, 1)
        count, side = x.shape[:2]
        x = (x + self._find_places(side)).reshape(count * side * side, -1)
        tiles = [(count, side * side)]
        x = yield from encode_layers(self._layers, x, lambda index: tiles)
        x = x.view(count, side, side, -1).permute(0, 3, 1, 2)
        for weight, norm in zip((self._narrow, self._smooth), self._norms, strict=True):
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
            x = norm.apply(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for weight in self._halve:
            x = F.conv2d(x, weight, stride=2, padding=1)
        return x.flatten(2).transpose(1, 2)

    def _find_places(self, side: int) -> Tensor:
        """Return the learned positions of a tile's patches, resampled if the tile is of another size."""
        if side == self._places.shape[1]:
            return self._places
        table = self._places.permute(0, 3, 1, 2).float()
        places = F.interpolate(table, (side, side), mode="bicubic", align_corners=False, antialias=True)
        return places.permute(0, 2, 3, 1).to(self._places.dtype)


class _QueryEncoder:
    """Layers of Qwen2 with learned queries behind the patches of a tile."""

    def __init__(self, load: LoadContext, hf: Mapping[str, Any], name: str) -> None:
        size, inner, num_heads = (
            int(hf[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        self._eps, head_dim = float(hf["rms_norm_eps"]), size // num_heads
        form = replace(_QUERY_LAYER, eps=self._eps, activation=hf["hidden_act"])
        self._layers = [
            EncoderLayer(
                load,
                f"{name}.model.model.layers.{index}",
                form,
                size,
                inner,
                num_heads,
                num_kv_heads=int(hf["num_key_value_heads"]),
            )
            for index in range(int(hf["num_hidden_layers"]))
        ]
        self.num_parameters = len(self._layers) * size * (4 * size + 3 * inner)
        self._norm = load.norm(f"{name}.model.model.norm", size)
        # Of tiles with at most as many patches, and of larger ones.
        self._few, self._many = (
            load.replicated(f"{name}.{own}.weight", *load.checkpoint.shape_of(f"{name}.{own}.weight"))
            for own in ("query_768", "query_1024")
        )
        theta = float(hf["rope_parameters"]["rope_theta"])
        self._frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)

    def forward(self, x: Tensor) -> Encoding:
        """[tiles, patches, E] -> [tiles, queries, E]."""
        count, num_patches, size = x.shape
        queries = self._few if num_patches <= len(self._few) else self._many
        x = torch.cat((x, queries.expand(count, -1, -1)), dim=1)
        length = x.shape[1]
        angles = torch.arange(length)[:, None] * self._frequencies
        angles = angles.repeat(count, 1).to(x.device)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask[:, :num_patches] = True
        mask[:num_patches, num_patches:] = False
        runs = [(count, length)]
        rotation = partial(rotate, cos=angles.cos(), sin=angles.sin())
        x = yield from encode_layers(self._layers, x.flatten(0, 1), lambda index: runs, rotation, mask=mask)
        own = x.view(count, length, size)[:, num_patches:]
        return rms_norm(own.reshape(-1, size), self._norm, self._eps).view(own.shape)
