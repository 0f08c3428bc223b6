"""EncoderOutputs: a rank's encoder outputs, and the tensors of images that are to be encoded.

The ranks of the first pipeline stage encode: the embeddings of images stand in the place of those that it looks up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...proto.block_tables import outputs_digest
from ...proto.step import WHOLE_IMAGE, EncoderInput, StepPlan
from ...proto.vision import VisionSpec
from ..memory.host_to_device import to_device_once
from ..models.media_embeddings import MediaEmbeddings
from ..models.vision.encoder import Encoder
from ..models.vision.parts import Encoding
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
        self._in_part: dict[int, _ImageInPart] = {}

    def take(self, image: EncoderInput) -> None:
        """Keep the tensors of an image until the plan that has it encoded."""
        self._inputs[image.media_id] = image

    def digest_after(self, plan: StepPlan) -> int:
        """Return the part of the encoder outputs in the digest of a plan."""
        held = self._held()
        if not (plan.encodes.size or plan.media_drops.size or held):
            return 0
        return outputs_digest((held - {*plan.media_drops.tolist()}) | {*plan.encodes.tolist()})

    def _held(self) -> set[int]:
        return {*self._outputs, *self._in_part}

    def apply(self, plan: StepPlan, encoder: Encoder | None) -> None:
        """Drop and compute the outputs of a plan, or the next parts of them.

        Raises:
            ValueError: the tensors of an image are not there, or do not fit the encoder.
        """
        for media_id in plan.media_drops.tolist():
            if self._in_part.pop(media_id, None) is None:
                del self._outputs[media_id]
        for media_id, share in zip(plan.encodes.tolist(), plan.encode_shares.tolist(), strict=True):
            image = self._in_part.pop(media_id, None) or self._begin(media_id, encoder)
            output = image.encode_up_to(share)
            if output is None:
                self._in_part[media_id] = image
            else:
                self._outputs[media_id] = output

    def _begin(self, media_id: int, encoder: Encoder | None) -> _ImageInPart:
        if encoder is None or media_id not in self._inputs:
            raise ValueError(f"the plan encodes image {media_id}, whose tensors have not come")
        tensors = self._inputs.pop(media_id).tensors()
        on_device = {name: to_device_once(each, self._device) for name, each in tensors.items()}
        return _ImageInPart(encoder.encode(on_device))

    def embeddings(self, media: StepMedia) -> MediaEmbeddings | None:
        """Return the embeddings of a step's image tokens; None if another rank puts them in their places.

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
        self._in_part.clear()


class EncodedElsewhere(EncoderOutputs):
    """The outputs of another stage, of which this rank knows which there are, as the plan's digest has them."""

    def __init__(self) -> None:
        super().__init__(None, torch.device("cpu"))
        self._ids = set[int]()

    def take(self, image: EncoderInput) -> None:
        pass

    def _held(self) -> set[int]:
        return self._ids

    def apply(self, plan: StepPlan, encoder: Encoder | None) -> None:
        self._ids.difference_update(plan.media_drops.tolist())
        self._ids.update(plan.encodes.tolist())

    def embeddings(self, media: StepMedia) -> MediaEmbeddings | None:
        return None

    def clear(self) -> None:
        self._ids.clear()


class _ImageInPart:
    """An image that is being encoded, over several steps."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._done = 0.0

    def encode_up_to(self, share: int) -> Tensor | None:
        """Do at least a share of the work, in parts of WHOLE_IMAGE; return the output if it is whole."""
        try:
            while share >= WHOLE_IMAGE or self._done * WHOLE_IMAGE < share:
                self._done = next(self._encoding)
        except StopIteration as end:
            output: Tensor = end.value
            return output
        return None
