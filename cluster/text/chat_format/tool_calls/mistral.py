"""Mistral: ``[TOOL_CALLS]`` and a JSON list of calls; since v11 of its tokenizer ``NAME[ARGS]{...}`` per call."""

from __future__ import annotations

import random
import re
import string

from ..json_call import emit_json_value, json_calls
from ..model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from .marked import content_and_calls

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = _CALLS, _CALL_ID, _ARGS

_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?=[\[{])")
_ID_CHARACTERS = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    """Return a random id of nine letters and digits, which Mistral's templates demand."""
    return "".join(random.choices(_ID_CHARACTERS, k=9))


def mistral(output: ModelOutput) -> Parse[None]:
    return content_and_calls(output, _calls, _CALLS)


def _calls(output: ModelOutput, opening: str) -> Parse[bool]:
    if (yield from json_calls(output, _CALLS)):
        return True
    found = yield from output.match(_NAME)
    if found is None:
        return False
    call_id = ""
    if (yield from output.accept(_CALL_ID)):
        call_id, _ = yield from output.text_until(_ARGS, max_chars=MAX_HEADER_CHARS)
    else:
        yield from output.accept(_ARGS)
    yield output.start_call(found[1], call_id.strip())
    yield from output.skip()
    if not (yield from emit_json_value(output, output.arguments, _CALLS)):
        yield output.arguments("{}")
    return True
