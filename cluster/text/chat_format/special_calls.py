"""Kinds of tool calls that texts around names and arguments do not tell.

They are Kimi's, Mistral's, Python's, Gemma's and those of MiniMax M3.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .json_call import emit_arguments
from .json_text import JsonText
from .model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from .tool_format import CallHeader, NamedCalls, ObjectCalls, ToolCallFormat, read_template
from .typed_arguments import ArgumentType, dump, literal, members_schema, told_type

_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(:\d+)?", re.DOTALL)
_PYTHON_NAME = re.compile(r"[^\W\d][\w.\-]*")
_PYTHON_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=(?=[^=])")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits
# Tags of elements: the end of a call, and an element of an array.
_CALL_END, _ITEM = "/invoke", "item"
_MAX_ELEMENT_DEPTH = 32
_TEXT = {"type": "string"}
# JSON type |-> JSON text of an element with nothing in it
_EMPTY = {"array": "[]", "object": "{}", "null": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiCalls(NamedCalls):
    """Calls with JSON arguments after their id, ``functions.NAME:NUMBER``, or after a bare name."""

    @property
    def call_tag(self) -> str:
        return self.header.partition("functions.")[0]

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        if not (yield from output.accept(self.call_tag)):
            return None
        text, _ = yield from output.text_until(self.header.rpartition("}")[2], max_chars=MAX_HEADER_CHARS)
        found = _KIMI_ID.fullmatch(text.strip())
        return None if found is None else CallHeader(found[1], text.strip() if found[2] else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralCalls(ObjectCalls):
    """A JSON list of calls, or since v11 of Mistral's tokenizer ``NAME[ARGS]{...}`` for each call."""

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        header = yield from ObjectCalls.read_header(self, output)
        if header is not None:
            return header
        name = yield from read_template(output, "{name}")
        call_id = ""
        if name and (yield from output.accept("[CALL_ID]")):
            text, _ = yield from output.text_until("[ARGS]", max_chars=MAX_HEADER_CHARS)
            call_id = text.strip()
            output.unread("[ARGS]")
        yield from output.skip()
        follows = (yield from output.accept("[ARGS]", "{")) if name else None
        if follows == "{":
            output.unread(follows)
        return CallHeader(name, call_id, is_object=False) if name and follows else None

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        if header.is_object:
            return (yield from ObjectCalls.read_arguments(self, output, header))
        yield from output.skip()
        if not (yield from emit_arguments(output, *self.tags)):
            yield output.arguments("{}")
        return True


def new_mistral_id() -> str:
    """Return a random id of nine letters and digits, which Mistral's templates demand."""
    return "".join(random.choices(_MISTRAL_ID_CHARACTERS, k=9))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls(ToolCallFormat):
    """Calls as Python writes them, ``NAME(KEY=VALUE, ...)``, mostly in a list."""

    header: str = "{name}("
    call_end: str = ")"
    is_section: bool = True
    is_forced: bool = False

    list_end: ClassVar[str] = "]"

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        name = yield from output.take(_PYTHON_NAME)
        yield from output.skip()
        return CallHeader(name) if name and (yield from output.accept("(")) else None

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        is_first = True
        while True:
            yield from output.skip()
            if (yield from output.accept(")")):
                yield output.arguments("{}" if is_first else "}")
                return True
            key = yield from output.match(_PYTHON_KEY)
            text, is_complete = yield from _python_value(output)
            if not is_complete:
                return False
            if key is not None:
                yield output.arguments(f"{'{' if is_first else ', '}{dump(key[1])}: {_python_json(text)}")
                is_first = False
            yield from output.accept(",")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls(ToolCallFormat):
    """Calls ``call:NAME{KEY:VALUE,...}``, like JSON with bare keys and with a quotation mark of its own.

    Attributes:
        quote: stands around strings.
    """

    quote: str
    header: str = "call:{name}{"
    call_end: str = "}"
    is_forced: bool = False

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        name = yield from read_template(output, "call:{name}")
        return CallHeader(name) if name and (yield from output.accept("{")) else None

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        scanner = JsonText()
        yield output.arguments(scanner.feed("{")[0])
        marker: str | None = ""
        is_string = False
        while not scanner.is_complete:
            if is_string:
                marker = yield from output.emit_until(
                    lambda text: output.arguments(scanner.feed(dump(text)[1:-1])[0]), self.quote, *self.ends
                )
            else:
                marker = yield from self._emit_structure(output, scanner)
            if marker != self.quote:
                break
            yield output.arguments(scanner.feed('"')[0])
            is_string = not is_string
        if marker is None:
            return False
        yield output.arguments(scanner.close())
        if marker in self.ends:
            output.unread(marker)
        return True

    def _emit_structure(self, output: ModelOutput, scanner: JsonText) -> Parse[str | None]:
        """Emit what stands between strings; return the marker after it, empty at the end of the arguments."""
        while True:
            text, num_chars = scanner.feed(output.arrived(self.quote, *self.ends))
            output.read(num_chars)
            if text:
                yield output.arguments(text)
            if scanner.is_complete:
                return ""
            if output.is_at_end:
                return None
            if output.is_at(self.quote, *self.ends):
                return (yield from output.accept(self.quote, *self.ends))
            yield None


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedTagCalls(ToolCallFormat):
    """Calls whose arguments are elements with their keys as tags, as deep as objects and arrays are nested.

    The elements of an array are named ``item``.

    Attributes:
        mark: stands before each tag.
    """

    mark: str
    is_section: bool = True

    @property
    def ends(self) -> tuple[str, ...]:
        return self.call_end.strip(), self.end.strip()

    @property
    def _section_ends(self) -> Iterable[str]:
        return self.ends[1:]

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        name = yield from read_template(output, self.header)
        return None if name is None else CallHeader(name)

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        root = output.tools.get(header.name, {})
        is_first = True
        while True:
            _, tag = yield from self._next_tag(output)
            if tag is None:
                return False
            if tag.startswith("/"):
                yield output.arguments("{}" if is_first else "}")
                if tag != _CALL_END:
                    self._unread_end(output, tag)
                return True
            value = yield from self._value(output, _member(root, root, tag), root, 0)
            if value is None:
                return False
            yield output.arguments(f"{'{' if is_first else ', '}{dump(tag)}: {value}")
            is_first = False

    def _value(
        self, output: ModelOutput, schema: Any, root: Mapping[str, Any], depth: int
    ) -> Parse[str | None]:
        """Read an element to its end and return its JSON text; None if the text ends within.

        An end of the call also ends its elements. The tags of elements that are nested too deep are left out.
        """
        members: list[tuple[str, str]] = []
        while True:
            text, tag = yield from self._next_tag(output)
            if tag is None:
                return None
            if tag.startswith("/"):
                self._unread_end(output, tag)
                return _element_json(text, members, told_type(schema, root))
            if depth == _MAX_ELEMENT_DEPTH:
                continue
            value = yield from self._value(output, _member(schema, root, tag), root, depth + 1)
            if value is None:
                return None
            members.append((tag, value))

    def _next_tag(self, output: ModelOutput) -> Parse[tuple[str, str | None]]:
        """Return the text before the next tag and what is in the tag; None for the tag at the end of the text."""
        text, mark = yield from output.text_until(f"{self.mark}<")
        if mark is None:
            return text, None
        output.unread(mark)
        output.bookmark()  # keeps the text for `_unread_end`
        yield from output.accept(mark)
        tag, end = yield from output.text_until(">")
        output.commit()
        return text, None if end is None else tag

    def _unread_end(self, output: ModelOutput, tag: str) -> None:
        """Return to the position before a tag if it ends the call or all calls."""
        if (end := f"{self.mark}<{tag}>") in self.ends:
            output.unread(end)


def _member(schema: Any, root: Mapping[str, Any], tag: str) -> Any:
    """Return the schema of an element in an element; that of a string if none is declared."""
    parent = members_schema(schema, root)
    properties = parent.get("properties")
    if isinstance(properties, Mapping) and tag in properties:
        return properties[tag]
    return parent.get("items", _TEXT) if tag == _ITEM else _TEXT


def _element_json(text: str, members: Sequence[tuple[str, str]], declared: ArgumentType) -> str:
    """Return the JSON text of an element with a text, or with elements in it."""
    if not members:
        is_text = text.strip() or "string" in declared.types
        return declared.json(text) if is_text else _EMPTY.get(min(declared.types, default=""), dump(text))
    if all(tag == _ITEM for tag, _ in members) and (
        "array" in declared.types or "object" not in declared.types
    ):
        return _array([value for _, value in members])
    values: dict[str, list[str]] = {}
    for tag, value in members:
        values.setdefault(tag, []).append(value)
    texts = (f"{dump(tag)}: {each[0] if len(each) == 1 else _array(each)}" for tag, each in values.items())
    return f"{{{', '.join(texts)}}}"


def _array(values: Sequence[str]) -> str:
    return f"[{', '.join(values)}]"


def _python_value(output: ModelOutput) -> Parse[tuple[str, bool]]:
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
            elif depth and character in ")]}":
                depth -= 1
        pieces.append(output.read(len(arrived)))
        if output.is_complete:
            return "".join(pieces), False
        yield None


def _python_json(text: str) -> str:
    """Return the JSON text of a Python or JSON literal; other text becomes a string."""
    text = text.strip()
    if text in _JSON_NAMES:
        return dump(_JSON_NAMES[text])
    try:
        return dump(literal(text))
    except ValueError:
        return dump(text)
