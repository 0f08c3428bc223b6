"""EncoderOutputs: a rank's encoder outputs, and the tensors of images that are to be encoded."""

from __future__ import annotations

import torch
from torch import Tensor

from ...proto.block_tables import outputs_digest
from ...proto.step import EncoderInput, StepPlan
from ...proto.vision import VisionSpec
from ..memory.host_to_device import to_device_once
from ..models.media_embeddings import MediaEmbeddings
from ..models.vision.encoder import Encoder
from ..step.media_rows import StepMedia


class EncoderOutputs:
    """media_id |-> encoder output, as the plans say.

    Args:
        vision: None for a model that reads no images.
    """

    def __init__(self, vision: VisionSpec | None, device: torch.device) -> None:
        self._vision, self._device = vision, device
        self._inputs: dict[int, EncoderInput] = {}
        self._outputs: dict[int, Tensor] = {}

    def take(self, image: EncoderInput) -> None:
        """Keep the tensors of an image until the plan that has it encoded."""
        self._inputs[image.media_id] = image

    def digest_after(self, plan: StepPlan) -> int:
        """Return the part of the encoder outputs in the digest of a plan."""
        if not (plan.encodes.size or plan.media_drops.size or self._outputs):
            return 0
        return outputs_digest(
            (self._outputs.keys() - {*plan.media_drops.tolist()}) | {*plan.encodes.tolist()}
        )

    def apply(self, plan: StepPlan, encoder: Encoder | None) -> None:
        """Drop and compute the outputs of a plan.

        Raises:
            ValueError: the tensors of an image are not there, or do not fit the encoder.
        """
        for media_id in plan.media_drops.tolist():
            del self._outputs[media_id]
        for media_id in plan.encodes.tolist():
            if encoder is None or media_id not in self._inputs:
                raise ValueError(f"the plan encodes image {media_id}, whose tensors have not come")
            tensors = self._inputs.pop(media_id).tensors()
            self._outputs[media_id] = encoder.encode(
                {name: to_device_once(each, self._device) for name, each in tensors.items()}
            )

    def embeddings(self, media: StepMedia) -> MediaEmbeddings:
        """Return the embeddings of a step's image tokens.

        Raises:
            ValueError: the rank lacks an output, or one has too few rows.
        """
        assert self._vision is not None, "a model that reads no images has image tokens"
        parts = []
        for media_id, start, end in media.pieces:
            output = self._outputs.get(media_id)
            if output is None or len(output) < end:
                num_rows = "no" if output is None else len(output)
                raise ValueError(f"the plan reads {end} embeddings of image {media_id}, which has {num_rows}")
            parts.append(output[start:end])
        rows, *deep = torch.cat(parts).split(self._vision.embedding_size, dim=1)
        return MediaEmbeddings(to_device_once(media.index, self._device), rows, deep)

    def clear(self) -> None:
        """Forget all outputs and tensors."""
        self._inputs.clear()
        self._outputs.clear()
