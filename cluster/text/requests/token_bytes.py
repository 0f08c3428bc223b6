"""TokenBytes: the bytes of each token of a byte-level vocabulary."""

from __future__ import annotations

from collections.abc import Callable


def _bytes_of_characters() -> dict[str, int]:
    """Return character of a byte-level token |-> byte: visible characters of Latin-1 stand for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _bytes_of_characters()


class TokenBytes(dict[int, bytes]):
    """token id |-> its bytes; those of an id outside the vocabulary are none. Filled as ids come.

    Args:
        token_of: returns the token of an id, None for an id without one.
        hidden: tokens without bytes.
    """

    def __init__(self, token_of: Callable[[int], str | None], hidden: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._token_of = token_of
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None or token in self._hidden:
            found = b""
        else:
            try:
                found = bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # an added token is its own text
                found = token.encode()
        self[token_id] = found
        return found
