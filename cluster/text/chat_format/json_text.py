"""JsonText: a JSON value that a model writes, passed on as it comes and mended where it is no JSON."""

from __future__ import annotations

import json
import re

_WHITESPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PREFIX = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_CONTROL = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
# Values as Python writes them.
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
# States: the scanner expects a value, the end of a member, a key or the colon after it.
_VALUE, _AFTER, _KEY, _COLON = range(4)


class JsonText:
    """Reads one value and returns the text to pass on. Valid JSON passes unchanged.

    Bare words become strings, raw control characters are escaped, missing commas and colons are added, and brackets
    that match none are left out. At each moment, the text passed on is the beginning of a valid value.

    Attributes:
        is_complete: the end of the value was found.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._open: list[str] = []
        self._state = _VALUE
        self._quote = ""  # of the string that is being read
        self._held = ""  # a word, an escape sequence or separators whose meaning is not known yet
        self._in_word = False
        self._has_comma = False

    def feed(self, text: str) -> tuple[str, int]:
        """Return the text to pass on and how many characters belong to the value."""
        pieces: list[str] = []
        at = 0
        while at < len(text) and not self.is_complete:
            if self._quote:
                at = self._read_string(text, at, pieces)
                continue
            character = text[at]
            if self._in_word and (character in "\"'{}[],:" or character in _WHITESPACE):
                self._end_word(pieces)
                continue
            if not self._open and self._state == _VALUE and not self._in_word and character in ",}]:":
                self.is_complete = True
                break
            at += 1
            self._read_character(character, pieces)
        return "".join(pieces), at

    def close(self) -> str:
        """Return what completes the value where the text ended within it."""
        pieces: list[str] = []
        if self._quote:
            pieces.append(("\\" + self._held if self._held else "") + '"')
            self._held = ""
            self._end_string()
        elif self._in_word:
            self._end_word(pieces)
        while self._open:
            self._close_bracket(self._open[-1], pieces)
        self.is_complete = True
        return "".join(pieces)

    def rest(self) -> str:
        """Return the beginning of a number or a name that is held back, where the text ended within it."""
        return (
            self._held
            if self._in_word and self._state == _VALUE and _scalar(self._held) == self._held
            else ""
        )

    def _read_character(self, character: str, pieces: list[str]) -> None:
        if self._in_word:
            self._held += character
        elif character in _WHITESPACE:
            if self._open:
                self._held += character
        elif character == ",":
            if self._state == _AFTER and not self._has_comma:
                self._held += character
                self._has_comma = True
        elif character == ":":
            if self._state == _COLON:
                pieces.append(self._take_held() + ":")
                self._state = _VALUE
        elif character in "}]":
            self._read_bracket(character, pieces)
        else:
            self._begin(character, pieces)

    def _begin(self, character: str, pieces: list[str]) -> None:
        """Begin a key or a value."""
        is_key = self._state == _KEY or (self._state == _AFTER and self._open[-1] == "{")
        if is_key and character in "{[":
            return
        if self._state == _COLON:
            pieces.append(":" + self._take_held())
            self._state = _VALUE
        elif self._state == _AFTER:
            pieces.append(("" if self._has_comma else ",") + self._take_held())
            self._state = _KEY if self._open[-1] == "{" else _VALUE
        else:
            pieces.append(self._take_held())
        self._has_comma = False
        if character in "\"'":
            self._quote = character
            pieces.append('"')
        elif character in "{[":
            self._open.append(character)
            self._state = _KEY if character == "{" else _VALUE
            pieces.append(character)
        else:
            self._in_word = True
            self._held = character

    def _read_bracket(self, character: str, pieces: list[str]) -> None:
        """Close what the bracket closes, with everything open within; nothing if it matches no open one."""
        opening = "{" if character == "}" else "["
        while opening in self._open:
            is_last = self._open[-1] == opening
            self._close_bracket(self._open[-1], pieces)
            if is_last:
                return

    def _close_bracket(self, opening: str, pieces: list[str]) -> None:
        held = self._take_held().replace(",", "")
        if self._state == _COLON:
            pieces.append(": null")
        elif self._state == _VALUE and opening == "{":
            pieces.append(" null")
        pieces.append(held + _CLOSING[opening])
        self._open.pop()
        self._end_value()

    def _read_string(self, text: str, at: int, pieces: list[str]) -> int:
        """Read characters of a string; return the position of the first that was not read."""
        if self._held or text[at] == "\\":
            return self._read_escape(text, at, pieces)
        end = at
        while end < len(text) and text[end] not in ("\\", self._quote) and text[end] >= " ":
            if text[end] == '"':  # in single quotes
                break
            end += 1
        pieces.append(text[at:end])
        if end == len(text) or text[end] == "\\":
            return end
        if text[end] == self._quote:
            pieces.append('"')
            self._end_string()
        else:
            pieces.append(_CONTROL.get(text[end], '\\"'))
        return end + 1

    def _read_escape(self, text: str, at: int, pieces: list[str]) -> int:
        self._held += text[at]
        if _ESCAPE.fullmatch(self._held):
            pieces.append(self._take_held())
        elif not _ESCAPE_PREFIX.match(self._held):
            if self._held == "\\'":
                pieces.append("'")
                self._held = ""
                return at + 1
            # No escape sequence: the backslash stands for itself, what follows is read again.
            pieces.append("\\" + self._held[:-1])
            self._held = ""
            return at
        return at + 1

    def _end_string(self) -> None:
        self._quote = ""
        if self._state == _KEY:
            self._state = _COLON
        else:
            self._end_value()

    def _end_word(self, pieces: list[str]) -> None:
        word, self._in_word = self._take_held(), False
        if self._state == _KEY:
            pieces.append(json.dumps(word))
            self._state = _COLON
            return
        pieces.append(_scalar(word))
        self._end_value()

    def _end_value(self) -> None:
        self._state = _AFTER
        self._has_comma = False
        self.is_complete = not self._open

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held


def _scalar(word: str) -> str:
    """Return the JSON text of a word without quotes."""
    if word in _PYTHON_NAMES:
        return _PYTHON_NAMES[word]
    try:
        json.loads(word, parse_constant=_refuse)
    except ValueError:
        return json.dumps(word)
    return word


def _refuse(constant: str) -> None:
    raise ValueError(constant)
