"""Helpers of tests of grammars: outputs that a grammar allows, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.proto.block_tables import IntArray
from quire.worker.structured.compilation import GrammarLibrary
from quire.worker.structured.grammar import CompiledGrammar, num_words
from quire.worker.structured.vocabulary import Vocabulary

VOCAB_SIZE, EOS = 3072, 0
# Tokens that end a string, an object, a list or a number.
_CLOSERS = (b'"', b"}", b"]", b"0", b"1", b"a")


def demo_library() -> GrammarLibrary:
    """Return the backends for the vocabulary of the bundled model."""
    return GrammarLibrary(str(DEMO_MODEL_PATH), VOCAB_SIZE, (EOS,))


@dataclass(frozen=True, slots=True)
class Walk:
    """A random output.

    Attributes:
        is_finished: it ended with the end of sequence, not with the limit.
    """

    text: bytes
    is_finished: bool


def random_walk(grammar: CompiledGrammar, vocabulary: Vocabulary, seed: int, max_tokens: int = 150) -> Walk:
    """Return an output whose tokens are drawn from the masks; tokens that end something are drawn more often."""
    rng, matcher, text = random.Random(seed), grammar.new_matcher(), b""
    closers = {vocabulary.id_by_piece[piece] for piece in _CLOSERS}
    words: IntArray = np.zeros(num_words(len(vocabulary)), dtype=np.int32)
    for step in range(max_tokens):
        matcher.fill_mask(words)
        allowed = [index for index in allowed_ids(words) if index != EOS]
        if words[0] & 1 and (not allowed or rng.random() < 0.5):
            assert matcher.accept(EOS)
            return Walk(text, is_finished=True)
        assert allowed, f"no token may follow {text!r}"
        closing = [index for index in allowed if index in closers]
        is_closing = bool(closing) and rng.random() < (0.3 if step < max_tokens // 3 else 0.9)
        token_id = rng.choice(closing if is_closing else allowed)
        assert matcher.accept(token_id), f"{vocabulary.pieces[token_id]!r} was allowed after {text!r}"
        text += vocabulary.pieces[token_id]
    return Walk(text, is_finished=False)


def allowed_ids(words: IntArray) -> list[int]:
    """Return the tokens of a mask."""
    return [int(index) for index in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
