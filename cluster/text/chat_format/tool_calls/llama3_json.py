"""Llama 3 and 4: ``{"name": ..., "parameters": {...}}`` as the whole reply, several separated by semicolons."""

from __future__ import annotations

from ..deltas import ContentDelta
from ..json_call import accept_all, json_call
from ..model_output import ModelOutput, Parse

_TAGS = "<|python_tag|>", "<|python_start|>"
_END = "<|python_end|>"
MARKERS = *_TAGS, _END


def llama3_json(output: ModelOutput) -> Parse[None]:
    """Read calls at the beginning of the text. Without a tag, only functions that the request offers are called."""
    output.bookmark()
    yield from output.skip()
    tag = yield from output.accept(*_TAGS)
    accepts = accept_all if tag else output.tools.__contains__
    if not (yield from json_call(output, _END, accepts=accepts)):
        output.rewind()
        yield from output.emit_until(ContentDelta)
        return
    output.commit()
    has_more = True
    while has_more:
        yield from output.skip("; \t\r\n")
        yield from output.accept(*_TAGS, _END)
        has_more = yield from json_call(output, _END, accepts=accepts)
    yield from output.emit_until(ContentDelta)
