"""Formats of tool calls as data: how calls are set apart from text, and how names and arguments are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .deltas import ContentDelta
from .json_call import call_name, emit_arguments, emit_members, json_key, object_text
from .model_output import MAX_HEADER_CHARS, ModelOutput, Parse
from .output_parser import new_call_id
from .tool_structures import ToolStructure
from .typed_arguments import ArgumentType, argument_type, emit_text_argument

_NAME = re.compile(r"[^\s<>{}\[\]()\"'=,｜|]*")
_NUMBER = re.compile(r"\d*")
_PLACEHOLDER = re.compile(r"(\{\w+\})")
# Between calls, beside the separator of the format.
_BETWEEN = " \t\r\n,;"
_BRACKETS = "{", "["
_FENCE = "```"
_MAX_JUNK_CHARS = 64
_TYPE = re.compile(r'(.*?)"\s+(?:type|string)="([^"]*)', re.DOTALL)
# Attribute of an argument |-> types of its value; other attributes are a type.
_STRING: frozenset[str] = frozenset({"string"})
_TYPES_OF_ATTRIBUTE = {"true": _STRING, "raw": _STRING, "false": frozenset[str](), "json": frozenset[str]()}


@dataclass(frozen=True, slots=True)
class CallHeader:
    """Beginning of a call.

    Attributes:
        name: the function's name.
        call_id: the id that the model wrote; empty to make one.
        arguments: JSON text that came before the name.
        is_object: the arguments are a member of a JSON object.
    """

    name: str
    call_id: str = ""
    arguments: str = ""
    is_object: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """Format of tool calls. Its texts are as the model writes them; their white space is optional to the reader.

    Attributes:
        begin, end: around the calls; no `begin` if calls are found by `untagged`.
        header: text before the arguments of each call, with ``{name}`` and possibly ``{number}``.
        call_end: text after the arguments of each call.
        separator: text between two calls.
        is_section: `begin` and `end` are around all calls; otherwise around each.
        openings, closings: further forms of `begin` and `end` that are read.
        untagged: texts that begin a call without `begin`, if the request offers its function.
        extras: further texts that the format depends on, which may be special tokens.
        is_forced: grammars can force the format.
        style: how grammars write the arguments, a style of xgrammar.
        shown_by: a chat template with all texts of one of these entries writes the format.
        new_id: returns the id of a call for which the model wrote none.
        models: models that write the format, for the documentation.
    """

    begin: str = ""
    end: str = ""
    header: str = '{"name": "{name}", "arguments": '
    call_end: str = "}"
    separator: str = ""
    is_section: bool = False
    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    untagged: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    is_forced: bool = True
    style: str = "json"
    shown_by: Sequence[tuple[str, ...]] = ()
    new_id: Callable[[], str] = new_call_id
    models: str = ""

    # Closes a list of calls.
    list_end: ClassVar[str] = ""

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that begin calls whatever their function, the longest first."""
        begins = {_opening(text) for text in (self.begin, *self.openings)} - {""}
        return tuple(sorted(begins, key=len, reverse=True))

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that the format depends on, which may be special tokens."""
        return tuple(dict.fromkeys(filter(None, (*self.tags, *self.ends, self.call_tag, *self.extras))))

    @property
    def call_tag(self) -> str:
        """The text before each name; empty for JSON objects."""
        return self.header.partition("{name}")[0].strip()

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that end a call wherever they come."""
        ends = _closing(self.call_end), _closing(self.end), *self.closings
        return tuple(dict.fromkeys(filter(None, ends)))

    @property
    def structure(self) -> ToolStructure | None:
        """The texts around the arguments, for grammars; None if no grammar can force the format."""
        if not self.is_forced:
            return None
        before, after = ("", "") if self.is_section else (self.begin, self.end)
        section = (self.begin, self.end) if self.is_section else ("", "")
        return ToolStructure(
            before + self.header,
            self.call_end + after,
            self.separator,
            *section,
            trigger=_opening(self.begin),
            style=self.style,
        )

    def read(self, output: ModelOutput) -> Parse[None]:
        """Read content and tool calls up to the end of the text.

        White space around tool calls is left out. A marker that no tool call follows is content.
        """
        while opening := (yield from output.content_until(*self.tags, *self.untagged)):
            before = output.trimmed
            if (yield from self.read_calls(output, opening)):
                yield from output.skip()
            else:
                yield ContentDelta(before + opening)

    def read_calls(self, output: ModelOutput, opening: str) -> Parse[bool]:
        """Read the calls that an opening begins, which was read last.

        Returns:
            False, with nothing after the opening read, if no call follows.
        """
        output.unread(opening)
        output.bookmark()
        header = yield from self._first_header(output, opening)
        if header is None:
            output.rewind()
            yield from output.accept(opening)
            return (yield from self._is_empty(output, opening))
        while header is not None:
            start = output.start_call(header.name, header.call_id)
            output.commit()
            yield start
            if not (yield from self.read_arguments(output, header)):
                return True
            output.bookmark()
            header = yield from self._header(output, opening)
        output.rewind()
        yield from self._skip_end(output, opening)
        return True

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        """Read a call up to its arguments; None if there is none."""
        raise NotImplementedError

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        """Emit the arguments of a call and read past its end. Returns False if the text ends within."""
        raise NotImplementedError

    def _first_header(self, output: ModelOutput, opening: str) -> Parse[CallHeader | None]:
        """Read a header after an opening. Within a section, text may come before it."""
        if opening not in _BRACKETS and opening != self.call_tag:
            yield from output.accept(opening)
        output.bookmark()
        header = yield from self._header(output, opening)
        if header is not None or not self.is_section or opening in self.untagged:
            output.commit()
            return header
        output.rewind()
        lead = self.call_tag or '[{"'
        _, marker = yield from output.text_until(lead, *self.ends[-1:], max_chars=MAX_HEADER_CHARS)
        if marker != lead:
            return None
        output.unread(marker)
        return (yield from self._header(output, opening))

    def _header(self, output: ModelOutput, opening: str) -> Parse[CallHeader | None]:
        yield from output.skip(_BETWEEN + ("[" if self.list_end else ""))
        header = yield from self.read_header(output)
        is_refused = header is not None and opening in self.untagged and header.name not in output.tools
        return None if is_refused else header

    def _is_empty(self, output: ModelOutput, opening: str) -> Parse[bool]:
        """Read past the end of a section without calls; False, with nothing read, if this is none."""
        ends = tuple(self._section_ends)
        if not self.is_section or not ends or opening in self.untagged:
            return False
        output.bookmark()
        yield from output.skip(_BETWEEN + "[]")
        is_empty = bool((yield from output.accept(*ends)))
        if is_empty:
            output.commit()
        else:
            output.rewind()
        return is_empty

    def _skip_end(self, output: ModelOutput, opening: str) -> Parse[None]:
        """Read past the end of the calls, with a little text before it."""
        yield from output.skip()
        if self.list_end:
            yield from output.accept(self.list_end)
            yield from output.skip()
        ends = (_FENCE,) if opening.startswith(_FENCE) else tuple(self._section_ends)
        if ends:
            _, marker = yield from output.text_until(*ends, *self.tags, max_chars=_MAX_JUNK_CHARS)
            if marker in self.tags:
                output.unread(marker)

    @property
    def _section_ends(self) -> Iterable[str]:
        return filter(None, (_closing(self.end), *self.closings))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCalls(ToolCallFormat):
    """Calls that are JSON objects with a name and arguments, or lists of them."""

    list_end: ClassVar[str] = "]"

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        name, arguments = yield from call_name(output, *self.ends)
        return None if name is None else CallHeader(name, arguments=arguments)

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        if header.arguments:
            yield output.arguments(object_text(header.arguments))
        if not (yield from emit_members(output, *self.ends, has_arguments=bool(header.arguments))):
            yield output.arguments("{}")
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedCalls(ObjectCalls):
    """Calls that are JSON objects whose one key is the function's name."""

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        if not (yield from output.accept("{")):
            return None
        name = yield from json_key(output)
        return None if name is None else CallHeader(name)

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        if not (yield from emit_arguments(output, *self.ends)):
            yield output.arguments("{}")
        yield from output.skip()
        yield from output.accept("}")
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(ToolCallFormat):
    """Calls whose arguments are JSON after a header with the name."""

    is_section: bool = True

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        name = yield from read_template(output, self.header)
        return None if name is None else CallHeader(name)

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        yield from output.skip()
        if not (yield from emit_arguments(output, *self.ends)):
            yield output.arguments("{}")
        if not self.call_end:
            return True
        _, marker = yield from output.text_until(*self.ends)
        if marker is not None and marker != self.ends[0]:
            output.unread(marker)
        return marker is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls(ToolCallFormat):
    """Calls whose arguments stand in tags, with a key each.

    Attributes:
        argument: text of an argument, with ``{key}``, ``{value}`` and possibly ``{type}``.
        value_openings, value_closings: further texts around a value that are read.
    """

    argument: str
    call_end: str = ""
    value_openings: tuple[str, ...] = ()
    value_closings: tuple[str, ...] = ()

    def read_header(self, output: ModelOutput) -> Parse[CallHeader | None]:
        name = yield from read_template(output, self.header)
        if name is not None and self.header.rstrip().endswith("{name}"):
            # Nothing but what follows tells a name from text.
            output.bookmark()
            yield from output.skip()
            follows = yield from output.accept(self._parts[0], *self.ends)
            output.rewind()
            name = name if follows else None
        return None if name is None else CallHeader(name)

    def read_arguments(self, output: ModelOutput, header: CallHeader) -> Parse[bool]:
        schema = output.tools.get(header.name, {})
        opening, key_ends, middle, closing = self._parts
        value_ends = self._value_ends
        is_first = True
        marker: str | None = ""
        while marker is not None and marker not in self.ends:
            if marker != opening:
                _, marker = yield from output.text_until(opening, *self.ends)
            if marker != opening:
                continue
            key, marker = yield from output.text_until(*key_ends, *self.ends)
            if marker not in key_ends:
                continue
            if middle:
                yield from output.skip()
                yield from output.accept(middle)
            if self.value_openings:
                yield from output.accept(*self.value_openings)
            if closing.startswith("\n") and marker != "\n":
                yield from output.accept("\n")
            name, declared = _key_and_type(key, schema)
            marker = yield from emit_text_argument(output, name, is_first, declared, *value_ends)
            is_first, marker = False, marker and marker.removeprefix("\n")
        if marker is None:
            return False
        yield output.arguments("{}" if is_first else "}")
        if marker != _closing(self.call_end):
            output.unread(marker)
        return True

    @property
    def _parts(self) -> tuple[str, tuple[str, ...], str, str]:
        """The tag before the key, the texts that end the key, the tag before the value and the text after it."""
        before, _, rest = self.argument.partition("{key}")
        between, _, after = rest.partition("{value}")
        end, _, middle = between.rpartition("{type}")[2].strip().partition("\n")
        is_line = between.endswith("\n")
        return before.strip(), (end, "\n") if is_line else (end,), middle.strip(), after.rstrip()

    @property
    def _value_ends(self) -> tuple[str, ...]:
        opening, _, _, closing = self._parts
        texts = dict.fromkeys((closing.strip(), opening, *self.ends, *self.value_closings))
        lines = ("\n", "") if closing.startswith("\n") else ("",)
        return tuple(line + text for text in texts for line in lines)


def read_template(output: ModelOutput, template: str) -> Parse[str | None]:
    """Read a header and return the name in it; None if the text is another.

    White space is optional around the texts of the header, and the text after the name may be missing.
    """
    name = ""
    for part in filter(str.strip, _PLACEHOLDER.split(template)):
        yield from output.skip()
        if part == "{name}":
            name = yield from output.take(_NAME)
        elif part == "{number}":
            yield from output.take(_NUMBER)
        elif not (yield from output.accept(part.strip())) and (not name or output.is_at_end):
            return None
    return name if name and not output.is_at_end else None


def _key_and_type(text: str, schema: Mapping[str, Any]) -> tuple[str, ArgumentType]:
    """Return the key of an argument, and the type of its value by its tag or by the tool's schema."""
    found = _TYPE.fullmatch(text)
    key = text.strip() if found is None else found[1].strip()
    declared = argument_type(schema, key)
    if found is None:
        return key, declared
    types = _TYPES_OF_ATTRIBUTE.get(found[2], frozenset({found[2]}))
    return key, ArgumentType(types, declared.texts if "string" in types else frozenset())


def _opening(text: str) -> str:
    """Return the text that begins calls without the bracket of a list."""
    return text.strip().removesuffix("[").strip()


def _closing(text: str) -> str:
    """Return the text that ends calls without the brackets of JSON and of Markdown before it."""
    return text.strip().lstrip("]})`").strip()
