"""Grammars of the library llguidance: nothing is computed before an output needs it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from ...proto.block_tables import IntArray
from .grammar import GrammarSpec, MatcherFailed, UnsupportedConstraint, num_words
from .json_schema import close_objects
from .lark_tags import WHITESPACE, lark_of_tag, with_python_classes
from .vocabulary import Vocabulary

# Limits of one step: about 15 ms each. A mask that needs more allows only the end of the output.
LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class _Scratch:
    """A mask that all matchers of a backend write, because numpy takes 1 us to tell an array's address."""

    def __init__(self, vocab_size: int) -> None:
        self.words: IntArray = np.zeros(num_words(vocab_size), dtype=np.int32)
        self.address, self.num_bytes = self.words.ctypes.data, self.words.nbytes


class GuidanceMatcher:
    """A matcher, and the stop tokens, of which the library knows one only as the end of its input."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: frozenset[int], scratch: _Scratch) -> None:
        self._matcher = matcher
        self._consume = matcher.try_consume_tokens
        self._stop_ids = stop_ids
        self._scratch = scratch
        self._num_stops = 0  # stop tokens at the end of what was accepted

    def accept(self, token_id: int) -> bool:
        if self._num_stops:
            return False
        if token_id in self._stop_ids:
            if not self._matcher.is_accepting():
                return False
            self._num_stops = 1
            return True
        return self._consume([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        num_stops = min(self._num_stops, num_tokens)
        self._num_stops -= num_stops
        if num_tokens > num_stops:
            self._matcher.rollback(num_tokens - num_stops)

    def copy(self) -> GuidanceMatcher:
        copied = GuidanceMatcher(self._matcher.deep_copy(), self._stop_ids, self._scratch)
        copied._num_stops = self._num_stops
        return copied

    def fill_mask(self, words: IntArray) -> None:
        if self._num_stops:
            words[:] = 0
            return
        scratch = self._scratch
        self._matcher.unsafe_compute_mask_ptr(scratch.address, scratch.num_bytes)
        if self._matcher.is_error():
            raise MatcherFailed(_shown(self._matcher.get_error()))
        words[:] = scratch.words

    @staticmethod
    def fill_masks(matchers: Sequence[GuidanceMatcher], words: IntArray, places: list[int]) -> None:
        start, row_bytes = words.ctypes.data, words.strides[0]
        # LLExecutor, with threads of its own, took 0.5 instead of 0.25 ms for 64 rows on two busy cores.
        for matcher, place in zip(matchers, places, strict=True):
            if matcher._num_stops:
                words[place] = 0
                continue
            own = matcher._matcher
            own.unsafe_compute_mask_ptr(start + place * row_bytes, row_bytes)
            if own.is_error():
                raise MatcherFailed(_shown(own.get_error()))

    def jump_forward_bytes(self) -> bytes:
        return b"" if self._num_stops else bytes(self._matcher.compute_ff_bytes())


class GuidanceGrammar:
    def __init__(
        self, tokenizer: llguidance.LLTokenizer, grammar: str, stop_ids: frozenset[int], scratch: _Scratch
    ) -> None:
        self._stop_ids, self._scratch = stop_ids, scratch
        self._first = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if self._first.is_error():
            raise UnsupportedConstraint(_shown(self._first.get_error()))

    def new_matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._first.deep_copy(), self._stop_ids, self._scratch)


class GuidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._scratch = vocabulary, _Scratch(len(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokenizer(vocabulary)),
            n_vocab=len(vocabulary),
            eos_token=list(vocabulary.stop_ids),
        )

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            grammar = _grammar(spec, self._vocabulary)
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedConstraint(str(error)) from error
        self.load(grammar.encode()).new_matcher().fill_mask(
            np.zeros(num_words(len(self._vocabulary)), dtype=np.int32)
        )
        return grammar.encode()

    def load(self, compiled: bytes) -> GuidanceGrammar:
        stop_ids = frozenset(self._vocabulary.stop_ids)
        return GuidanceGrammar(self._tokenizer, compiled.decode(), stop_ids, self._scratch)


class _Tokenizer:
    """The vocabulary as llguidance reads it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.pieces
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    matcher = llguidance.LLMatcher
    match spec.kind:
        case "json" | "json_object":
            schema: Any = json.loads(spec.text) if spec.kind == "json" else {"type": "object"}
            if spec.disable_additional_properties:
                schema = close_objects(schema)
            if spec.disable_any_whitespace:
                return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))
            return str(matcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
        case "regex":
            return str(matcher.grammar_from_regex(with_python_classes(spec.text)))
        case "choice" | "grammar":
            return str(llguidance.grammar_from(spec.kind, spec.text))
        case _:
            return str(matcher.grammar_from_lark(lark_of_tag(json.loads(spec.text), vocabulary)))


def _shown(message: str) -> str:
    """Return a message of the library in one line, without its limits and its trace."""
    line = next((line for line in message.splitlines() if line.strip()), "is not supported")
    return re.sub(r"^ParserTooComplex: ", "is too complex: ", line)
