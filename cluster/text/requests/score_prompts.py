"""Prompts of a reranker: a query and a document, as the model's chat template or its tokenizer joins them."""

from __future__ import annotations

import re

from ....proto.config import EngineConfig
from .chat import Chat
from .request import AnyPrompt, TextPair
from .tokenizer import Tokenizer

# A template for rerankers names the roles of a query and a document.
_ROLES = (re.compile(r"""["']query["']"""), re.compile(r"""["']document["']"""))


class ScorePrompts:
    """Makes the prompts of pairs for one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        template = config.chat.chat_template or tokenizer.chat_template() or ""
        self._has_roles = all(role.search(template) for role in _ROLES)

    def prompt(self, query: str, document: str, instruction: str | None = None) -> AnyPrompt:
        """Return the prompt of a pair.

        Args:
            instruction: a system message, if the model has a template for rerankers; ignored otherwise.
        """
        if not self._has_roles:
            return TextPair(query, document)
        roles = {"system": instruction, "query": query, "document": document}
        return Chat([{"role": role, "content": text} for role, text in roles.items() if text is not None])
