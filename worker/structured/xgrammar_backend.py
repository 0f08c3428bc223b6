"""Grammars of the library xgrammar: masks are computed when a grammar is compiled, as far as they can be."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

import xgrammar

from ...proto.block_tables import IntArray
from ...proto.errors import first_line
from .grammar import MAX_WHITESPACE_CHARS, GrammarSpec, UnsupportedConstraint
from .json_schema import check_exact_in_xgrammar, close_objects
from .structural_tags import prepare_tag
from .vocabulary import Vocabulary

# GBNF names its root rule root, Lark start.
_LARK_ROOT = re.compile(r"^\s*[?!]?start\s*:(?!:)", re.MULTILINE)


@functools.cache
def _batch() -> xgrammar.BatchGrammarMatcher:
    """Return the library's calls for many matchers."""
    return xgrammar.BatchGrammarMatcher(max_threads=1)


class XGrammarMatcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork())

    def fill_mask(self, words: IntArray) -> None:
        self._matcher.fill_next_token_bitmask(words.reshape(1, -1))

    @staticmethod
    def fill_masks(matchers: Sequence[XGrammarMatcher], words: IntArray, places: list[int]) -> None:
        _batch().batch_fill_next_token_bitmask([matcher._matcher for matcher in matchers], words, places)

    def jump_forward_bytes(self) -> bytes:
        return self._matcher.find_jump_forward_string().encode()


class XGrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def new_matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled))


class XGrammarBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = xgrammar.TokenizerInfo(
            vocabulary.text_pieces,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary),
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            return self._compile(spec).serialize_json().encode()
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedConstraint(_plain(first_line(error))) from error

    def load(self, compiled: bytes) -> XGrammarGrammar:
        try:
            grammar = xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._tokenizer)
        except RuntimeError as error:
            raise ValueError(first_line(error)) from error
        return XGrammarGrammar(grammar)

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        text = spec.text
        match spec.kind:
            case "json" | "json_object":
                return self._compile_schema(spec)
            case "regex":
                return self._compiler.compile_regex(text)
            case "choice":
                options = " | ".join(map(_literal, json.loads(text)))
                return self._compiler.compile_grammar(f"root ::= {options}")
            case "grammar" if _LARK_ROOT.search(text):
                return self._compiler.compile_lark(text)
            case "grammar":
                return self._compiler.compile_grammar(text)
            case _:
                return self._compiler.compile_structural_tag(
                    json.dumps(prepare_tag(json.loads(text), self._vocabulary))
                )

    def _compile_schema(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        schema = json.loads(spec.text) if spec.kind == "json" else {"type": "object"}
        if spec.disable_additional_properties:
            schema = close_objects(schema)
        check_exact_in_xgrammar(schema)
        return self._compiler.compile_json_schema(
            json.dumps(schema),
            any_whitespace=not spec.disable_any_whitespace,
            separators=(",", ":") if spec.disable_any_whitespace else None,
            max_whitespace_cnt=None if spec.disable_any_whitespace else MAX_WHITESPACE_CHARS,
            strict_mode=False,
        )


def _literal(text: str) -> str:
    """Return a text as a literal of GBNF."""
    return json.dumps(text)


def _plain(message: str) -> str:
    """Return a message of the library without the place in its source."""
    return re.sub(r"^\[[^\]]*\]\s*[\w/.-]*:\d+:\s*", "", message)
