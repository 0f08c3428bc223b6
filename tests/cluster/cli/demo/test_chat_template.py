"""The demo model's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_encoder import ChatEncoder
from quire.cluster.text.requests.tokenizer import LocalPromptEncoder, Tokenizer
from quire.proto.errors import InvalidRequest
from quire.proto.options.sections import ChatOptions


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer(str(demo_model_dir))


def prompt(tokenizer: Tokenizer, chat: Chat) -> str:
    token_ids = (
        ChatEncoder(ChatOptions(), tokenizer, LocalPromptEncoder(tokenizer)).encode(chat).token_ids.tolist()
    )
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def test_each_message_is_a_paragraph(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "A tale of the sea."},
        {"role": "user", "content": "The ship was old.\n"},
        {"role": "assistant", "content": "So was her captain."},
    ]
    assert prompt(tokenizer, Chat(messages[:2])) == (
        "<|endoftext|>A tale of the sea.\n\nThe ship was old.\n\n"
    )
    assert prompt(tokenizer, Chat(messages, continue_final_message=True)) == (
        "<|endoftext|>A tale of the sea.\n\nThe ship was old.\n\nSo was her captain."
    )


def test_tools_are_refused(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(InvalidRequest, match="needs --tool-call-parser"):
        prompt(tokenizer, Chat([{"role": "user", "content": "When?"}], tools=[tool]))
