"""Processors of families whose own in transformers need torchvision for images too, or write more than the images."""

from __future__ import annotations

from typing import Any

from ....proto.model.transformers_spec import import_transformers

import_transformers()

from transformers.models.paligemma.processing_paligemma import (  # noqa: E402  after its settings
    PaliGemmaProcessor as WholePromptProcessor,
)
from transformers.processing_utils import ProcessorMixin  # noqa: E402


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """Images of Pixtral and Mistral 3: a token for each square of patches, and one at the end of each row."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **settings: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_token_id = image_token, tokenizer.convert_tokens_to_ids(image_token)
        self._square = patch_size * spatial_merge_size
        self._break, self._end = image_break_token, image_end_token

    def _process_images(self, images: Any, **settings: Any) -> Any:
        return super()._process_images(images, **settings | {"patch_size": self._square})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **settings: Any) -> str:
        """Return the text that stands for an image."""
        height, width = (int(length) // self._square for length in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width
        return (row + self._break) * (height - 1) + row + self._end


class PaliGemmaProcessor(WholePromptProcessor):  # type: ignore[misc]
    """Images of PaliGemma alone: the token after them and the line's end are in the prompt."""

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, **settings: Any) -> Any:
        """Return the inputs as they are."""
        return ProcessorMixin.prepare_inputs_layout(self, images=images, text=text, **settings)


OWN_PROCESSORS = {"PixtralProcessor": PixtralProcessor, "PaliGemmaProcessor": PaliGemmaProcessor}
