"""Encoder: the interface of an encoder of images to the ranks, and load_encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from ....proto.errors import ModelLoadError
from ....proto.vision import VisionSpec
from ...comm.communicator import SingleRank
from ...lora.layers import NO_LORA
from ..load_context import LoadContext
from .deepseek_ocr2 import DeepseekOcr2Encoder
from .gemma4 import Gemma4Encoder
from .glm4v import Glm4vEncoder
from .grid_vit import KIMI_K25, PADDLE_OCR, GridVitEncoder
from .minimax_m3 import MiniMaxM3Encoder
from .muse_spark import MuseSparkEncoder
from .parts import Encoding
from .pixtral import MISTRAL_LARGE_4, PixtralEncoder
from .qwen2_5_vl import Qwen2_5VLEncoder
from .qwen3_vl import Qwen3VLEncoder
from .step3p7 import Step3p7Encoder
from .vit import (
    AdaptedProjector,
    LinearProjector,
    MlpProjector,
    PooledProjector,
    Projector,
    ShuffledProjector,
    TiledProjector,
    VitEncoder,
)


class Encoder(Protocol):
    """Encoder of images; the ranks share each layer, or each of them holds it whole. It computes each image alone.

    So its output does not depend on what else is in a step, and is the same on each rank.
    """

    def encode(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return the embeddings of an image, [rows, VisionSpec.row_size], computed in pieces.

        Args:
            tensors: name |-> tensor, as the model's image processor returned it for one image.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of encoder.

    Attributes:
        make: reads it from a checkpoint, given what the names of its tensors begin with before its modules.
        modules: of a model, that it consists of.
    """

    make: Callable[[LoadContext, VisionSpec, str], Encoder]
    modules: tuple[str, ...]


def _vit(
    projector: Callable[[LoadContext, VisionSpec, str], Projector],
    modules: tuple[str, ...] = ("vision_tower.", "multi_modal_projector."),
) -> _Kind:
    return _Kind(partial(VitEncoder, projector=projector), modules)


_KINDS = {
    "qwen2_5_vl": _Kind(Qwen2_5VLEncoder, ("visual.",)),
    "qwen3_vl": _Kind(Qwen3VLEncoder, ("visual.",)),
    "glm4v": _Kind(Glm4vEncoder, ("visual.",)),
    "pixtral": _Kind(PixtralEncoder, ("vision_tower.", "multi_modal_projector.")),
    "mistral_large4": _Kind(
        partial(PixtralEncoder, names=MISTRAL_LARGE_4),
        ("vision_encoder.", "pre_mm_projector_norm.", "patch_merger.", "vision_language_adapter."),
    ),
    "minimax_m3": _Kind(MiniMaxM3Encoder, ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")),
    "gemma3": _vit(PooledProjector),
    "paligemma": _vit(LinearProjector),
    "llava": _vit(MlpProjector),
    "llava_next": _vit(TiledProjector),
    "idefics3": _vit(ShuffledProjector, ("vision_model.", "connector.")),
    "llama4": _vit(AdaptedProjector, ("vision_model.", "multi_modal_projector.")),
    "gemma4": _Kind(Gemma4Encoder, ("vision_tower.", "embed_vision.")),
    "paddleocr_vl": _Kind(partial(GridVitEncoder, form=PADDLE_OCR), ("visual.", "mlp_AR.")),
    "deepseek_ocr2": _Kind(
        DeepseekOcr2Encoder, ("sam_model.", "qwen2_model.", "projector.", "view_seperator")
    ),
    "step3p7": _Kind(Step3p7Encoder, ("vision_model.", "vit_large_projector.")),
    "muse_spark": _Kind(MuseSparkEncoder, ("vision_tower.", "vision_adapter.", "vision_projection.")),
    "kimi_k25": _Kind(partial(GridVitEncoder, form=KIMI_K25), ("vision_tower.", "mm_projector.")),
}
# Text before the modules of an encoder, in published checkpoints and in those of transformers 5.
_ROOTS = ("", "model.")


def load_encoder(load: LoadContext, vision: VisionSpec, tp_mode: str = "weights") -> Encoder:
    """Read an encoder from the checkpoint of its model.

    Args:
        tp_mode: see ImageOptions.mm_encoder_tp_mode.

    Raises:
        ModelLoadError: its weights cannot be read.
    """
    kind, names = _KINDS[vision.kind], load.checkpoint.names()
    found = [root for root in _ROOTS if any(name.startswith(root + kind.modules[0]) for name in names)]
    if not found:
        raise ModelLoadError(
            f"the checkpoint has no encoder of images: no tensor's name begins with {kind.modules[0]}; "
            "language_model_only serves the text model alone"
        )
    quantization = load.quantization
    if quantization is not None and quantization.is_online:
        quantization = None
    comm = load.comm if tp_mode == "weights" else SingleRank()
    own = replace(load, comm=comm, peers=None, lora=NO_LORA, quantization=quantization)
    return kind.make(own, vision, found[0])


def ignore_encoder(load: LoadContext) -> None:
    """Leave the weights of an encoder unread."""
    prefixes = tuple(root + module for root in _ROOTS for kind in _KINDS.values() for module in kind.modules)
    for name in load.checkpoint.names():
        if name.startswith(prefixes):
            load.checkpoint.ignore(name)
