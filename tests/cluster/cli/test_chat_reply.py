"""`quire chat` sets reasoning apart from the reply."""

from __future__ import annotations

from quire.cluster.cli.chat import _Reply
from quire.cluster.text.chat_format.deltas import ContentDelta, ReasoningDelta, ToolCallStart
from quire.cluster.text.requests.outputs import CompletionDelta, RequestStarted, StreamEvent


def test_reply_separates_reasoning_from_content() -> None:
    events: list[StreamEvent] = [
        RequestStarted("r", "tiny", 3),
        CompletionDelta(0, "", [1], chat=(ReasoningDelta("Hm"),)),
        CompletionDelta(0, "", [2], chat=(ReasoningDelta("."), ContentDelta("Yes"))),
        CompletionDelta(0, "", [3], chat=(ToolCallStart(0, "c", "now"),)),
        CompletionDelta(0, "", [4], chat=(ContentDelta("."),)),
    ]
    reply = _Reply()
    assert reply.is_empty
    assert list(reply.read(iter(events))) == [
        ("Hm", False),
        (".", False),
        ("\n\n", False),
        ("Yes", True),
        (".", True),
    ]
    assert reply.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert not reply.is_empty
