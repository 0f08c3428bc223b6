"""Chat: a conversation, which the model's chat template renders to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...proto.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64
# ``{"role": ..., "content": ...}`` with a role that the model's template supports.
Message = Mapping[str, str]

# Limit for the contents of all messages together, and for the rendered prompt.
MAX_CHAT_CHARS = 4 << 20

# Arguments of apply_chat_template that quire sets or that callers must not set.
_RESERVED_OPTIONS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Args:
        messages: oldest first; the roles are usually ``system``, ``user`` and ``assistant``.
        continue_final_message: continue the last message, which must be the assistant's, instead of a new one.
        template_options: further variables of the template by name, for example ``tools``.
    """

    messages: Sequence[Message]
    continue_final_message: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidRequest, which names the message, if this is not a valid conversation."""
        if not 0 < len(self.messages) <= MAX_MESSAGES:
            problem = f"are {len(self.messages)}, must be 1 to {MAX_MESSAGES}"
            raise InvalidRequest("chat.messages", problem)
        for index, message in enumerate(self.messages):
            _check_message(f"chat.messages[{index}]", message)
        num_chars = sum(len(message["content"]) for message in self.messages)
        if num_chars > MAX_CHAT_CHARS:
            raise InvalidRequest("chat.messages", f"have {num_chars} characters, at most {MAX_CHAT_CHARS}")
        for name in self.template_options:
            if name in _RESERVED_OPTIONS:
                raise InvalidRequest(f"chat.template_options[{name!r}]", "is reserved, must not be set")


def _check_message(field: str, message: object) -> None:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidRequest(field, "must have role and content, and nothing else")
    for name in ("role", "content"):
        text = message[name]
        if not isinstance(text, str):
            raise InvalidRequest(f"{field}.{name}", f"is {text!r}, must be text")
        check_text(f"{field}.{name}", text)
    if not 0 < len(message["role"]) <= MAX_ROLE_CHARS:
        raise InvalidRequest(f"{field}.role", f"has {len(message['role'])} characters, 1 to {MAX_ROLE_CHARS}")


def check_text(field: str, text: str) -> None:
    """Raises InvalidRequest if the text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode text at character {error.start}") from error
