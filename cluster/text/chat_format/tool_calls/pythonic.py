"""Format of Llama 3.2 and 4: a Python list of calls as the whole reply, ``[name(key=value, ...), ...]``."""

from __future__ import annotations

import re

from ..deltas import ContentDelta
from ..model_output import ModelOutput, Parse
from ..typed_arguments import dump, literal
from .tool_format import ToolCallFormat

_START, _END = "<|python_start|>", "<|python_end|>"

_NAME = re.compile(r"\s*([^\W\d][\w.\-]*)\s*\(")
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=(?=[^=])")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_WHITESPACE = " \t\r\n"


def _pythonic(output: ModelOutput) -> Parse[None]:
    """Read calls at the beginning of the text. The first must be of a function that the request offers."""
    output.bookmark()
    yield from output.skip()
    yield from output.accept(_START)
    yield from output.skip()
    found = (yield from output.match(_NAME)) if (yield from output.accept("[")) else None
    if found is None or found[1] not in output.tools:
        output.rewind()
        yield from output.emit_until(ContentDelta)
        return
    output.commit()
    while found is not None:
        yield output.start_call(found[1])
        if not (yield from _arguments(output)):
            return
        yield from output.skip()
        found = (yield from output.match(_NAME)) if (yield from output.accept(",")) else None
    yield from output.accept("]")
    yield from output.skip()
    yield from output.accept(_END)
    yield from output.skip()
    yield from output.emit_until(ContentDelta)


def _arguments(output: ModelOutput) -> Parse[bool]:
    """Read the arguments of a call and its closing bracket. Returns False if the text ends within."""
    is_first = True
    while True:
        yield from output.skip()
        if (yield from output.accept(")")):
            yield output.arguments("{}" if is_first else "}")
            return True
        key = yield from output.match(_KEY)
        text, is_complete = yield from _value(output)
        if not is_complete:
            return False
        if key is not None:
            yield output.arguments(f"{'{' if is_first else ', '}{dump(key[1])}: {_json(text)}")
            is_first = False
        yield from output.accept(",")


def _value(output: ModelOutput) -> Parse[tuple[str, bool]]:
    """Read the text of a value up to a comma or a closing bracket; return it and whether the end has come."""
    pieces: list[str] = []
    quote, is_escaped, depth = "", False, 0
    while True:
        arrived = output.arrived()
        for position, character in enumerate(arrived):
            if quote:
                quote = "" if character == quote and not is_escaped else quote
                is_escaped = character == "\\" and not is_escaped
            elif character in "\"'":
                quote = character
            elif character in "([{":
                depth += 1
            elif not depth and character in ",)":
                return "".join([*pieces, output.read(position)]), True
            elif character in ")]}":
                depth -= 1
        pieces.append(output.read(len(arrived)))
        if output.is_complete:
            return "".join(pieces), False
        yield None


def _json(text: str) -> str:
    """Return the JSON text of a Python or JSON literal; other text becomes a string."""
    text = text.strip(_WHITESPACE)
    if text in _JSON_NAMES:
        return dump(_JSON_NAMES[text])
    try:
        return dump(literal(text))
    except ValueError:
        return dump(text)


PYTHONIC = ToolCallFormat(_pythonic, (_START, _END), shown_by=[("[func_name1(",)])
