"""Vision transformers (Dosovitskiy et al., 2020) with learned positions: SigLIP, CLIP and InternViT, and projectors.

Families differ by a VitForm, and by the projector that makes embeddings of the tower's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

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
    encode_layers,
    grid_angles,
    read_layer_norm,
    read_linear,
    read_norm,
    rotate_pairs,
)


@dataclass(frozen=True, slots=True)
class VitForm:
    """Form of a tower, and the names of its modules.

    Attributes:
        roots: of the tower, of which the checkpoint has one.
        patches: the convolution of patches.
        positions: tensor of the positions.
        layers: module of the layers.
        layer: its `eps`, `norm` and `activation` are those of the configuration.
        class_token: tensor of the token before the patches; empty for none.
        class_last: the token is behind the patches.
        rotates: neighbors in a query or key are rotated, half of them by column, the others by row, from 1.
        first_norm, last_norm: norms before and after the layers; empty for none.
    """

    roots: tuple[str, ...]
    patches: str
    positions: str
    layers: str
    layer: LayerForm
    patch_bias: bool = True
    class_token: str = ""
    first_norm: str = ""
    last_norm: str = ""
    class_last: bool = False
    rotates: bool = False


_SIGLIP_LAYER = LayerForm(
    ("layer_norm1", "layer_norm2"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj",
    ("mlp.fc1",),
    "mlp.fc2",
)
SIGLIP = VitForm(
    ("vision_tower.vision_model", "vision_tower"),
    "embeddings.patch_embedding",
    "embeddings.position_embedding.weight",
    "encoder.layers",
    _SIGLIP_LAYER,
    last_norm="post_layernorm",
)


CLIP = replace(
    SIGLIP,
    patch_bias=False,
    class_token="embeddings.class_embedding",
    first_norm="pre_layrnorm",
    last_norm="post_layernorm",
)
INTERN_VIT = VitForm(
    ("vision_tower",),
    "embeddings.patch_embeddings.projection",
    "embeddings.position_embeddings",
    "encoder.layer",
    LayerForm(
        ("layernorm_before", "layernorm_after"),
        ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attention.projection_layer",
        ("mlp.fc1",),
        "mlp.fc2",
        factors=("lambda_1", "lambda_2"),
        head_norms=("attention.q_norm", "attention.k_norm"),
    ),
    class_token="embeddings.cls_token",
    last_norm="layernorm",
)
LLAMA_4 = VitForm(
    ("vision_model",),
    "patch_embedding.linear",
    "positional_embedding_vlm",
    "model.layers",
    LayerForm(
        ("input_layernorm", "post_attention_layernorm"),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.o_proj",
        ("mlp.fc1",),
        "mlp.fc2",
        eps=1e-5,
    ),
    patch_bias=False,
    class_token="class_embedding",
    first_norm="layernorm_pre",
    last_norm="layernorm_post",
    class_last=True,
    rotates=True,
)
# Model type of the encoder |-> its form.
_FORMS = {
    "siglip_vision_model": SIGLIP,
    "clip_vision_model": CLIP,
    "internvl_vision": INTERN_VIT,
    "llama4_vision_model": LLAMA_4,
    "idefics3_vision": replace(SIGLIP, roots=("vision_model",)),
    "smolvlm_vision": replace(SIGLIP, roots=("vision_model",)),
}


class Projector(Protocol):
    """Makes embeddings of a tower's outputs."""

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """[tiles, tokens, E] -> [rows, embedding size].

        Args:
            tensors: as for Encoder.encode.
        """
        ...


class VitEncoder:
    """A tower with a projector; see `Encoder`."""

    def __init__(
        self,
        load: LoadContext,
        spec: VisionSpec,
        root: str,
        projector: Callable[[LoadContext, VisionSpec, str], Projector],
    ) -> None:
        self._tower = _Tower(load, spec.hf, root, _FORMS[spec.hf["model_type"]])
        self._projector = projector(load, spec, root)

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, [rows, E]."""
        pixels = tensors["pixel_values"]
        x = yield from self._tower.forward(pixels.view(-1, *pixels.shape[-3:]))
        return self._projector.project(x, tensors)


class _Tower:
    def __init__(self, load: LoadContext, hf: Mapping[str, Any], root: str, form: VitForm) -> None:
        names = load.checkpoint.names()
        tower = next(
            own for own in (f"{root}{each}" for each in form.roots) if f"{own}.{form.positions}" in names
        )
        size, self._patch_size = int(hf["hidden_size"]), _length(hf["patch_size"])
        shape = size, int(hf.get("num_channels", 3)), self._patch_size, self._patch_size
        patches = f"{tower}.{form.patches}.weight"
        self._patches = load.replicated(patches, *load.checkpoint.shape_of(patches)).view(shape)
        self._patch_bias = load.replicated(f"{tower}.{form.patches}.bias", size) if form.patch_bias else None
        self._side = _length(hf["image_size"]) // self._patch_size
        num_places = self._side**2 + bool(form.class_token)
        self._places = _read_table(load, f"{tower}.{form.positions}", num_places, size)
        self._class_token, self._class_last = None, form.class_last
        if form.class_token:
            self._class_token = _read_table(load, f"{tower}.{form.class_token}", 1, size)
        layer = replace(
            form.layer,
            eps=float(hf.get("layer_norm_eps", form.layer.eps)),
            activation=hf["hidden_act"],
            norm="rms" if hf.get("norm_type") == "rms_norm" else "layer",
            qkv_bias=bool(hf.get("attention_bias", True)),
            head_norms=form.layer.head_norms if hf.get("use_qk_norm") else (),
            head_norm_len=size,
        )
        self._layers = [
            EncoderLayer(
                load,
                f"{tower}.{form.layers}.{index}",
                layer,
                size,
                int(hf["intermediate_size"]),
                int(hf["num_attention_heads"]),
            )
            for index in range(int(hf["num_used_layers"]))
        ]
        plain = replace(layer, norm="layer")
        self._first_norm = (
            read_norm(load, f"{tower}.{form.first_norm}", size, plain) if form.first_norm else None
        )
        self._angles: Tensor | None = None
        if form.rotates:
            head_dim, theta = (
                size // int(hf["num_attention_heads"]),
                float(hf["rope_parameters"]["rope_theta"]),
            )
            by_row, by_column = grid_angles(self._side, self._side, 1, head_dim, theta, first=1).chunk(
                2, dim=1
            )
            self._angles = F.pad(torch.cat((by_column, by_row), dim=1), (0, 0, 0, 1))
        ends = form.last_norm and hf["has_last_norm"]
        self._last_norm = read_norm(load, f"{tower}.{form.last_norm}", size, plain) if ends else None

    def forward(self, pixels: Tensor) -> Encoding:
        """[tiles, C, H, W] -> [tiles, tokens, E]."""
        x = F.conv2d(pixels.to(self._patches.dtype), self._patches, self._patch_bias, stride=self._patch_size)
        places = self._places if x.shape[2:] == (self._side, self._side) else self._find_places(*x.shape[2:])
        x = x.flatten(2).transpose(1, 2)
        if self._class_token is not None:
            token = self._class_token.expand(len(x), 1, -1)
            x = torch.cat((x, token) if self._class_last else (token, x), dim=1)
        x = x + places
        num_tiles, num_tokens, _ = x.shape
        x = x.flatten(0, 1)
        if self._first_norm is not None:
            x = self._first_norm(x)
        runs = [(num_tiles, num_tokens)]
        rotation = None
        if self._angles is not None:
            angles = self._angles.to(x.device).repeat(num_tiles, 1)
            rotation = partial(rotate_pairs, cos=angles.cos(), sin=angles.sin())
        x = yield from encode_layers(self._layers, x, lambda index: runs, rotation)
        if self._last_norm is not None:
            x = self._last_norm(x)
        return x.view(num_tiles, num_tokens, -1)

    def _find_places(self, rows: int, columns: int) -> Tensor:
        """Return the positions of a grid of another size: each patch has that of the table at its share of a side."""
        if self._class_token is not None:
            raise ValueError(
                f"an image has {rows} x {columns} patches, the encoder reads {self._side} squared"
            )
        bounds = torch.arange(1 / self._side, 1.0, 1 / self._side)
        row, column = (
            torch.bucketize((torch.arange(length) / length).clamp(max=1 - 1e-6), bounds, right=True)
            for length in (rows, columns)
        )
        index = (row[:, None] * self._side + column).flatten()
        return self._places[index.to(self._places.device)]


class ShuffledProjector:
    """Squares of patches as one embedding, by one matrix (Idefics 3)."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        self._side, name = spec.merge_size, f"{root}connector.modality_projection.proj"
        merged = int(spec.hf["hidden_size"]) * self._side**2
        self._output = read_linear(load, [name], merged, spec.embedding_size, bias=False)

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Projector.project."""
        return self._output.forward(_merge_squares(x, self._side))


class MlpProjector:
    """Two linear layers for each patch (LLaVA), or for each square of patches after a norm (InternVL)."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        name, hf, self._side = f"{root}multi_modal_projector", spec.hf, spec.merge_size
        size, merged = spec.embedding_size, int(hf["hidden_size"]) * self._side**2
        self._norm = None
        if hf["projector_norm"]:
            self._norm = read_layer_norm(load, f"{name}.layer_norm", merged, 1e-5)
        bias = bool(hf["projector_bias"])
        self._inner = read_linear(load, [f"{name}.linear_1"], merged, size, bias=bias)
        self._output = read_linear(load, [f"{name}.linear_2"], size, size, bias=bias)
        self._activation = ACTIVATIONS[hf["projector_act"]]
        self._first = int(hf["drops_class"])

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Projector.project."""
        x = _merge_squares(x[:, self._first :], self._side)
        if self._norm is not None:
            x = self._norm.apply(x)
        return self._output.forward(self._activation(self._inner.forward(x)))


class AdaptedProjector:
    """Squares of patches through two linear layers, with an activation behind each, and a matrix (Llama 4)."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        hf, self._side, adapter = spec.hf, spec.merge_size, f"{root}vision_model.vision_adapter.mlp"
        merged, inner = int(hf["hidden_size"]) * self._side**2, int(hf["projector_input_dim"])
        adapted = int(hf["projector_output_dim"])
        self._inner = read_linear(load, [f"{adapter}.fc1"], merged, inner, bias=False)
        self._outer = read_linear(load, [f"{adapter}.fc2"], inner, adapted, bias=False)
        output = f"{root}multi_modal_projector.linear_1"
        self._output = read_linear(load, [output], adapted, spec.embedding_size, bias=False)

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Projector.project."""
        x = F.gelu(self._inner.forward(_merge_squares(x[:, :-1], self._side)))
        return self._output.forward(F.gelu(self._outer.forward(x)))


class TiledProjector(MlpProjector):
    """A shrunk image, then its tiles put together with an embedding at the end of each row (LLaVA-NeXT)."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        super().__init__(load, spec, root)
        hf = spec.hf
        self._tile, self._sizes = int(hf["image_size"]), [tuple(map(int, each)) for each in hf["tile_sizes"]]
        self._tile_side = self._tile // int(hf["patch_size"])
        self._most_tiles = hf["most_tiles"]
        newline = f"{root}image_newline"
        self._newline = load.replicated(newline, spec.embedding_size)

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Projector.project."""
        height, width = tensors["image_sizes"].flatten().tolist()
        rows, columns = (length // self._tile for length in _best_size(height, width, self._sizes))
        if len(x) != 1 + rows * columns:
            raise ValueError(f"an image has {len(x)} tiles, must have {1 + rows * columns}")
        whole, *tiles = super().project(x, tensors).unflatten(0, (len(x), -1))
        side = self._tile_side
        grid = torch.stack(tiles).view(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3)
        grid = _without_padding(grid.reshape(-1, rows * side, columns * side), height, width)
        if self._most_tiles is not None:
            shrink = (grid.shape[1] * grid.shape[2] / (self._most_tiles * side**2)) ** 0.5
            if shrink > 1.1:
                size = [int(length // shrink) for length in grid.shape[1:]]
                grid = F.interpolate(grid[None], size, mode="bilinear")[0]
        ends = self._newline[:, None, None].expand(-1, grid.shape[1], 1)
        return torch.cat((whole, torch.cat((grid, ends), dim=2).flatten(1).t()))


def _best_size(height: int, width: int, sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the size of tiles in which an image keeps most of its pixels, and of these the smallest."""

    def value(size: tuple[int, ...]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=value)


def _without_padding(grid: Tensor, height: int, width: int) -> Tensor:
    """Return the part of a grid [E, rows, columns] that an image of this size has, which was padded to it."""
    rows, columns = grid.shape[1:]
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return grid[:, padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return grid[:, :, padding : columns - padding]


def _merge_squares(x: Tensor, side: int) -> Tensor:
    """Put the numbers of squares of patches beside each other: [tiles, tokens, E] -> [rows, side² E]."""
    if side == 1:
        return x.flatten(0, 1)
    length, size = int(x.shape[1] ** 0.5) // side, x.shape[2]
    squares = x.reshape(-1, length, side, length, side, size).transpose(2, 3)
    return squares.reshape(-1, side * side * size)


class LinearProjector:
    """One linear layer (PaliGemma)."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        name = f"{root}multi_modal_projector.linear"
        self._linear = read_linear(load, [name], int(spec.hf["hidden_size"]), spec.embedding_size)

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Projector.project."""
        return self._linear.forward(x.flatten(0, 1))


class PooledProjector:
    """Means of squares of patches, normalized and multiplied by one matrix (Gemma 3)."""

    def __init__(self, load: LoadContext, spec: VisionSpec, root: str) -> None:
        name, size, hf = f"{root}multi_modal_projector", int(spec.hf["hidden_size"]), spec.hf
        self._side = int(hf["image_size"]) // int(hf["patch_size"])
        self._pooled = self._side // int(hf["mm_tokens_per_image"]) ** 0.5
        self._norm, self._eps = load.norm(f"{name}.mm_soft_emb_norm", size, 1.0), float(hf["layer_norm_eps"])
        self._matrix = load.replicated(f"{name}.mm_input_projection_weight", size, spec.embedding_size)

    def project(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Projector.project."""
        grid = x.transpose(1, 2).unflatten(2, (self._side, self._side))
        pooled = F.avg_pool2d(grid, int(self._pooled)).flatten(2).transpose(1, 2).flatten(0, 1)
        return rms_norm(pooled.contiguous(), self._norm, self._eps) @ self._matrix


def _read_table(load: LoadContext, name: str, rows: int, size: int) -> Tensor:
    """Read a table [rows, size], which checkpoints may store with further dimensions of one."""
    shape = load.checkpoint.shape_of(name)
    return load.replicated(name, *shape).view(rows, size)


def _length(value: Any) -> int:
    """Return the length of a square's side, which configurations state once or twice."""
    if isinstance(value, (list, tuple)):
        if len({*value}) > 1:
            raise ValueError(f"{value} is not square")
        return int(value[0])
    return int(value)
