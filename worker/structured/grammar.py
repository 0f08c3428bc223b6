"""Interfaces of a grammar backend: compiled grammars and their matchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...proto.block_tables import IntArray

# Between two parts of a JSON text; enough to indent it. Small models write white space without an end if they may.
MAX_WHITESPACE_CHARS = 32


class UnsupportedConstraint(Exception):
    """A backend does not support the constraint, or it is invalid; the message names the part."""


class MatcherFailed(UnsupportedConstraint):
    """A matcher cannot go on with its output, for example because it exceeds the library's limits."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint as compilers take it; the fields are those of StructuredOutputsParams.

    Attributes:
        kind: ``json``, ``json_object``, ``regex``, ``choice``, ``grammar`` or ``structural_tag``.
        text: the constraint; JSON text for all but ``regex`` and ``grammar``.
    """

    kind: str
    text: str
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class Matcher(Protocol):
    """The state of one output in its grammar. It starts before the first token."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. Returns False, with the state unchanged, if the grammar does not allow it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Go back by accepted tokens."""
        ...

    def copy(self) -> Matcher:
        """Return a matcher with this state; the two are independent of each other."""
        ...

    def fill_mask(self, words: IntArray) -> None:
        """Set the bits of the allowed next tokens, [ceil(V / 32)] int32 contiguous. Raises MatcherFailed."""
        ...

    @staticmethod
    def fill_masks(matchers: Sequence[Any], words: IntArray, places: list[int]) -> None:
        """Fill the masks of matchers of this class together, each at its place of `words`, [N, ceil(V / 32)] int32.

        Raises:
            Exception: any of them failed; `fill_mask` tells which.
        """
        ...

    def jump_forward_bytes(self) -> bytes:
        """Return the bytes with which every allowed continuation begins; empty if there are none."""
        ...


class CompiledGrammar(Protocol):
    """A grammar for one vocabulary."""

    def new_matcher(self) -> Matcher: ...


class GrammarBackend(Protocol):
    """A library of grammars, for one vocabulary. For one thread."""

    def compile(self, spec: GrammarSpec) -> bytes:
        """Return the compiled grammar in the form that `load` reads.

        Raises:
            UnsupportedConstraint: see there.
        """
        ...

    def load(self, compiled: bytes) -> CompiledGrammar:
        """Return the grammar. Raises ValueError if another version of the library compiled it."""
        ...


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask."""
    return -(-vocab_size // 32)


def allows(words: IntArray, token_id: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(int(words[token_id // 32]) >> (token_id % 32) & 1)


def set_only(words: IntArray, token_ids: Sequence[int]) -> None:
    """Make a mask of these tokens."""
    words[:] = 0
    add_to_mask(words, token_ids)


def add_to_mask(words: IntArray, token_ids: Sequence[int]) -> None:
    """Allow further tokens."""
    unsigned = words.view("<u4")
    for token_id in token_ids:
        unsigned[token_id // 32] |= 1 << (token_id % 32)


def remove_from_mask(words: IntArray, token_ids: Sequence[int]) -> None:
    """Forbid tokens."""
    unsigned = words.view("<u4")
    for token_id in token_ids:
        unsigned[token_id // 32] &= 0xFFFFFFFF ^ (1 << (token_id % 32))
