"""RowConstraint: reasoning before a grammar, its budget, going back, masks behind drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from grammars import allowed_ids

from quire.proto.block_tables import IntArray
from quire.proto.structured_outputs import OutputConstraint
from quire.worker.structured.grammar import set_only
from quire.worker.structured.row_constraint import MAX_ROLLBACK, RowConstraint, jump_forward_tokens
from quire.worker.structured.vocabulary import Vocabulary

PIECES = [b"<end>", b"a", b"b", b"c", b"<think>", b"</think>", b"</th", b"ink>", b"ab"]
END, A, B, C, THINK, CLOSE, CLOSE_1, CLOSE_2, AB = range(len(PIECES))


def encode(text: str) -> list[int]:
    """Split a text at the longest pieces."""
    found: list[int] = []
    rest = text.encode()
    while rest:
        index = max(
            (number for number, piece in enumerate(PIECES) if rest.startswith(piece)),
            key=lambda n: len(PIECES[n]),
        )
        found.append(index)
        rest = rest[len(PIECES[index]) :]
    return found


VOCABULARY = Vocabulary(PIECES, frozenset({END}), (END,), encode)


class Text:
    """Matcher of one text, token by token."""

    def __init__(self, *token_ids: int) -> None:
        self._rest = [*token_ids, END]
        self._done: list[int] = []

    def accept(self, token_id: int) -> bool:
        if self._rest[:1] != [token_id]:
            return False
        self._done.append(self._rest.pop(0))
        return True

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._rest.insert(0, self._done.pop())

    def copy(self) -> Text:
        copied = Text()
        copied._rest, copied._done = self._rest.copy(), self._done.copy()
        return copied

    def fill_mask(self, words: IntArray) -> None:
        set_only(words, self._rest[:1])

    @staticmethod
    def fill_masks(matchers: Sequence[Text], words: IntArray, places: list[int]) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            matcher.fill_mask(words[place])

    def jump_forward_bytes(self) -> bytes:
        return b"".join(PIECES[token_id] for token_id in self._rest if token_id != END)


def make(constraint: OutputConstraint, *token_ids: int) -> RowConstraint:
    return RowConstraint(constraint, Text(*token_ids) if token_ids else None, VOCABULARY)


def allowed(row: RowConstraint) -> list[int] | None:
    words = np.zeros(1, dtype=np.int32)
    if not row.fill_mask(words):
        return None
    return [index for index in allowed_ids(words) if index < len(PIECES)]


REASONS = OutputConstraint(3, reasoning_ends=("</think>",))
MAY_REASON = OutputConstraint(3, reasoning_starts=("<think>",), reasoning_ends=("</think>",))
NOT_END = [index for index in range(len(PIECES)) if index != END]


def test_grammar_constrains_from_the_first_token_without_reasoning() -> None:
    row = make(OutputConstraint(3), A, B)
    assert allowed(row) == [A]
    row.accept(A)
    assert allowed(row) == [B]
    row.accept(B)
    assert allowed(row) == [END]


@pytest.mark.parametrize("closing", [[CLOSE], [CLOSE_1, CLOSE_2]])
def test_grammar_begins_after_the_reasoning(closing: list[int]) -> None:
    row = make(REASONS, A)
    for token_id in [C, B, *closing]:
        assert allowed(row) == NOT_END
        row.accept(token_id)
    assert allowed(row) == [A]


def test_first_token_may_begin_the_reasoning_or_the_grammar() -> None:
    row = make(MAY_REASON, A)
    assert allowed(row) == [A, THINK]
    row.accept(A)
    assert allowed(row) == [END]
    row.rollback(1)
    row.accept(THINK)
    assert allowed(row) == NOT_END
    row.accept(CLOSE)
    assert allowed(row) == [A]


def test_budget_forces_the_end_of_the_reasoning() -> None:
    constraint = OutputConstraint(
        3, reasoning_ends=("</think>",), thinking_token_budget=2, forced_end_ids=(CLOSE_1, CLOSE_2)
    )
    row = make(constraint)
    for token_id in (C, C):
        assert allowed(row) is None
        row.accept(token_id)
    assert allowed(row) == [CLOSE_1]
    row.accept(CLOSE_1)
    assert allowed(row) == [CLOSE_2]
    row.accept(CLOSE_2)
    assert allowed(row) is None
    assert not row.is_active


def test_budget_of_zero_forces_the_end_at_once() -> None:
    constraint = OutputConstraint(
        3, reasoning_ends=("</think>",), thinking_token_budget=0, forced_end_ids=(CLOSE,)
    )
    row = make(constraint, A)
    assert allowed(row) == [CLOSE]
    row.accept(CLOSE)
    assert allowed(row) == [A]


@pytest.mark.parametrize(("start", "opening"), [("<think>", [THINK]), ("aab", [A, AB]), ("aab", [A, A, B])])
def test_budget_begins_with_the_opening_that_the_model_writes(start: str, opening: list[int]) -> None:
    constraint = OutputConstraint(
        3,
        reasoning_starts=(start,),
        reasoning_ends=("</think>",),
        thinking_token_budget=1,
        forced_end_ids=(CLOSE,),
    )
    row = make(constraint)
    for token_id in [*opening, C]:
        assert allowed(row) is None
        row.accept(token_id)
    assert allowed(row) == [CLOSE]
    row.rollback(1)
    assert allowed(row) is None


@pytest.mark.parametrize("output", [[C], [A, C], [END]])
def test_output_without_reasoning_has_no_budget(output: list[int]) -> None:
    constraint = OutputConstraint(
        3,
        reasoning_starts=("aab",),
        reasoning_ends=("</think>",),
        thinking_token_budget=0,
        forced_end_ids=(CLOSE,),
    )
    row = make(constraint)
    for token_id in output:
        row.accept(token_id)
    assert allowed(row) is None
    assert not row.is_active


def test_after_the_end_only_stop_tokens_are_allowed() -> None:
    row = make(OutputConstraint(3), A)
    for token_id in (A, END):
        row.accept(token_id)
    assert allowed(row) == [END]
    row = make(OutputConstraint(3), A)
    row.accept(C)  # not in the grammar
    assert allowed(row) == [END]


def test_state_is_a_function_of_the_tokens() -> None:
    tokens = [THINK, C, CLOSE_1, CLOSE_2, A, B]
    row = make(MAY_REASON, A, B)
    masks = []
    for token_id in tokens:
        masks.append(allowed(row))
        row.accept(token_id)
    for count in range(1, len(tokens) + 1):
        row.rollback(1)
        assert allowed(row) == masks[-count]
    row.accept(tokens[0])
    row.accept(tokens[1])
    assert allowed(row) == masks[2]


def test_fork_replaces_the_last_tokens_and_leaves_its_parent_unchanged() -> None:
    parent = make(MAY_REASON, A, B)
    for token_id in [THINK, C, CLOSE, A, B]:
        parent.accept(token_id)
    output = [THINK, C, CLOSE, A]
    forked = parent.fork(output)
    assert forked is not None
    assert allowed(forked) == [B]
    assert allowed(parent) == [END]
    forked.rollback(2)
    assert allowed(forked) == NOT_END
    ended = parent.fork([THINK, C, CLOSE, A, C])
    assert ended is not None
    assert allowed(ended) == [END]


def test_fork_is_not_made_too_far_back_or_from_a_failed_matcher() -> None:
    parent = make(REASONS, A)
    for _ in range(MAX_ROLLBACK + 2):
        parent.accept(C)
    assert parent.fork([C, C]) is None
    assert parent.fork([C, C, C]) is not None
    parent.failure = "planted"
    assert parent.fork([C, C, C]) is None


@pytest.mark.parametrize("space", [[1], []])
def test_space_that_a_tokenizer_puts_before_a_text_is_left_out(space: list[int]) -> None:
    pieces = [b"<end>", b" ", b"ab", b" ab", b"c"]
    spelled = [*space, 2, 4, 4] if space else [3, 4, 4]
    vocabulary = Vocabulary(pieces, frozenset({0}), (0,), lambda text: spelled)
    assert jump_forward_tokens(b"abcc", vocabulary) == [2, 4]


def test_masks_behind_drafts_are_those_of_accepted_tokens() -> None:
    row = make(OutputConstraint(3), A, B, C)
    words = np.zeros((3, 1), dtype=np.int32)
    row.fill_masks([A, B], words)
    assert [allowed_ids(each) for each in words] == [[A], [B], [C]]
    row.fill_masks([A, A], words)
    assert [allowed_ids(each) for each in words] == [[A], [B], [B]]
    assert allowed(row) == [A]


def test_jump_forward_tokens_are_those_of_the_tokenizer() -> None:
    row = make(OutputConstraint(3), AB, C, A)
    assert row.jump_forward_ids(8) == [AB, C]
    assert row.jump_forward_ids(1) == [AB]
    assert allowed(row) == [AB]


@pytest.mark.parametrize(
    ("forced", "token_ids"), [(b"", []), (b"ab", []), (b"abc", [AB]), (b"caba", [C, AB]), (b"\xff", [])]
)
def test_last_token_of_jump_forward_bytes_is_open(forced: bytes, token_ids: list[int]) -> None:
    assert jump_forward_tokens(forced, VOCABULARY) == token_ids
