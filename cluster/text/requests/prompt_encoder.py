"""PromptEncoder: text and conversations to token ids, in this process or elsewhere."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ....proto.block_tables import IntArray
from .chat_template import Rendering, render
from .tokenizer import Tokenizer

# Limit for a rendered prompt.
MAX_PROMPT_CHARS = 4 << 20
# Characters of a rendered prompt that tell the state in which it leaves the model.
END_CHARS = 1024


class PromptEncoder(Protocol):
    """Tokenizes prompts. Threads may share one."""

    def encode_text(self, text: str, *, add_special_tokens: bool, pair: str | None = None) -> IntArray:
        """Return the token ids of a text, or of two texts as the model's tokenizer joins them."""
        ...

    def encode_chat(self, rendering: Rendering) -> tuple[IntArray, str]:
        """Return the token ids of a rendered conversation, and the end of its text.

        Raises:
            TemplateError: the template cannot be rendered.
        """
        ...


class LocalPromptEncoder:
    """Tokenizes in the thread of the caller, without limits of time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_text(self, text: str, *, add_special_tokens: bool, pair: str | None = None) -> IntArray:
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, pair=pair)
        return np.asarray(token_ids, dtype=np.int32)

    def encode_chat(self, rendering: Rendering) -> tuple[IntArray, str]:
        text = render(rendering, MAX_PROMPT_CHARS)
        return self.encode_text(text, add_special_tokens=False), text[-END_CHARS:]
