"""RowConstraint: the constraint of one running sequence, from its reasoning to the end of its grammar."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...proto.block_tables import IntArray
from ...proto.errors import first_line
from ...proto.structured_outputs import OutputConstraint
from .grammar import Matcher, add_to_mask, allows, remove_from_mask, set_only
from .vocabulary import Vocabulary

# Tokens that can be taken back: a beam replaces its newest token, and drafts are a few tokens long.
MAX_ROLLBACK = 64


class _Phase(enum.Enum):
    START = "start"  # before the reasoning, which the next token may begin
    REASONING = "reasoning"
    GRAMMAR = "grammar"
    ENDED = "ended"  # after the grammar's end, or after a token that it does not allow
    FREE = "free"  # without a grammar, once the reasoning has ended


class _State(NamedTuple):
    """Everything but the matcher's state.

    Attributes:
        num_reasoning_tokens: of the reasoning so far.
        tail: last bytes of the reasoning, in which its end is looked for; before it, the bytes that may begin it.
    """

    phase: _Phase
    num_reasoning_tokens: int = 0
    tail: bytes = b""


# One object each, which `accept` recognizes.
_IN_GRAMMAR, _ENDED = _State(_Phase.GRAMMAR), _State(_Phase.ENDED)


class RowConstraint:
    """State of a constraint as a function of the tokens accepted so far.

    Args:
        matcher: of the grammar; None without one.

    Attributes:
        failure: why the matcher cannot go on; empty if it can.
        extra_time_s: processor time of the matcher beyond what a row may take for its tokens, see MatchTime.
    """

    __slots__ = (
        "_after_reasoning", "_constraint", "_ends", "_matcher", "_num_recorded", "_past", "_run", "_start_ids",
        "_starts", "_state", "_stop_ids", "_tail_len", "_vocabulary", "extra_time_s", "failure",
    )  # fmt: skip

    def __init__(self, constraint: OutputConstraint, matcher: Matcher | None, vocabulary: Vocabulary) -> None:
        self.failure = ""
        self.extra_time_s = 0.0
        self._constraint = constraint
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_ids = vocabulary.stop_ids
        self._ends = [text.encode() for text in constraint.reasoning_ends]
        self._tail_len = max(map(len, self._ends), default=0)
        self._starts = [text.encode() for text in constraint.reasoning_starts]
        starts = (vocabulary.id_by_piece.get(text) for text in self._starts)
        self._start_ids = [token_id for token_id in starts if token_id is not None]
        self._after_reasoning = _Phase.FREE if matcher is None else _Phase.GRAMMAR
        self._state = _first_state(self._first_phase())
        # Tokens before the run, and of each of the last of them: the state before it, and whether the matcher has
        # accepted it.
        self._num_recorded = 0
        self._past: deque[tuple[_State, bool]] = deque(maxlen=MAX_ROLLBACK)
        # The last tokens as far as the matcher has accepted them within the grammar, and has not come to its end.
        self._run = 0

    @property
    def is_active(self) -> bool:
        """The next token may be constrained."""
        return self._state.phase is not _Phase.FREE

    @property
    def matcher_in_grammar(self) -> Matcher | None:
        """The matcher if it alone makes the next mask; None in another phase, or if it has failed."""
        return self._matcher if self._state is _IN_GRAMMAR and not self.failure else None

    def accept(self, token_id: int) -> None:
        """Advance by a token of the output."""
        state, matcher = self._state, self._matcher
        is_of_grammar = state is _IN_GRAMMAR or self._begins_grammar(token_id)
        is_matched = is_of_grammar and matcher is not None and matcher.accept(token_id)
        is_end = token_id in self._stop_ids
        if is_matched and state is _IN_GRAMMAR and not is_end:
            self._run += 1
            return
        self._past.extend([(_IN_GRAMMAR, True)] * min(self._run, MAX_ROLLBACK))
        self._past.append((state, is_matched))
        self._num_recorded += self._run + 1
        self._run = 0
        if is_matched:
            self._state = _ENDED if is_end else _IN_GRAMMAR
        else:
            self._state = self._next_unmatched(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Go back by up to MAX_ROLLBACK tokens."""
        num_matched = min(num_tokens, self._run)
        self._run -= num_matched
        num_earlier = num_tokens - num_matched
        self._num_recorded -= num_earlier
        for _ in range(num_earlier):
            self._state, was_matched = self._past.pop()
            num_matched += was_matched
        if self._matcher is not None and num_matched:
            self._matcher.rollback(num_matched)

    def fork(self, output: list[int]) -> RowConstraint | None:
        """Return the constraint of another output, from the state of this one.

        Returns None if that is more than MAX_ROLLBACK tokens back, or if the matcher has failed.

        Args:
            output: at least one token; all but the last are also the first ones of this output.
        """
        num_back = self._num_recorded + self._run - (len(output) - 1)
        if not 0 <= num_back <= min(self._run + len(self._past), MAX_ROLLBACK) or self.failure:
            return None
        matcher = None if self._matcher is None else self._matcher.copy()
        forked = RowConstraint(self._constraint, matcher, self._vocabulary)
        forked._state, forked._run, forked.extra_time_s = self._state, self._run, self.extra_time_s
        forked._num_recorded, forked._past = self._num_recorded, self._past.copy()
        forked.rollback(num_back)
        forked.accept(output[-1])
        return forked

    def fill_mask(self, words: IntArray) -> bool:
        """Set the bits of the allowed next tokens, [ceil(V / 32)] int32. Returns False if all are allowed.

        An empty mask means the end of the output; the caller adds the stop tokens.
        """
        phase = self._state.phase
        if phase is _Phase.FREE or (phase is _Phase.START and self._matcher is None):
            return False
        if phase is _Phase.REASONING:
            return self._fill_reasoning(words)
        if phase is _Phase.ENDED or self._matcher is None:
            set_only(words, self._vocabulary.stop_ids)
            return True
        self._matcher.fill_mask(words)
        if phase is _Phase.START:
            add_to_mask(words, self._start_ids)
        return True

    def fill_masks(self, draft_ids: list[int], words: IntArray) -> None:
        """Set the masks of the next token and of those after each draft, [1 + drafts, ceil(V / 32)] int32.

        A position behind a draft that is not allowed gets the mask of the position before it.
        """
        num_accepted = 0
        for index, token_id in enumerate([*draft_ids, None]):
            if not self.fill_mask(words[index]):
                words[index] = -1
            if token_id is None or not allows(words[index], token_id):
                words[index + 1 :] = words[index]
                break
            self.accept(token_id)
            num_accepted += 1
        self.rollback(num_accepted)

    def jump_forward_ids(self, max_tokens: int) -> list[int]:
        """Return the next tokens as far as the constraint leaves no choice of bytes, at most `max_tokens`."""
        phase, forced_end = self._state.phase, self._constraint.forced_end_ids
        if phase is _Phase.REASONING and self._is_over_budget:
            return list(forced_end[self._num_over_budget :][:max_tokens])
        if phase is not _Phase.GRAMMAR or self._matcher is None:
            return []
        return jump_forward_tokens(self._matcher.jump_forward_bytes(), self._vocabulary)[:max_tokens]

    def _first_phase(self) -> _Phase:
        if not self._ends:
            return self._after_reasoning
        if not self._starts:
            return _Phase.REASONING
        # A grammar allows the beginning of the reasoning beside its own if that is one token.
        return _Phase.START if self._matcher is None or self._start_ids else self._after_reasoning

    def _begins_grammar(self, token_id: int) -> bool:
        return self._state.phase is _Phase.START and token_id not in self._start_ids

    def _next_unmatched(self, token_id: int) -> _State:
        """Return the state after a token that the matcher has not accepted."""
        state = self._state
        if state.phase is _Phase.START:
            return self._next_of_start(token_id)
        if state.phase is _Phase.REASONING:
            return self._next_of_reasoning(token_id)
        return state if state.phase is _Phase.FREE else _ENDED

    def _next_of_start(self, token_id: int) -> _State:
        """Return the state after a token before the reasoning, which the matcher, if there is one, does not allow."""
        if self._matcher is not None:
            return _State(_Phase.REASONING) if token_id in self._start_ids else _ENDED
        text = (self._state.tail + self._vocabulary.pieces[token_id]).lstrip()
        for start in self._starts:
            if text.startswith(start):
                return _State(_Phase.REASONING, 0, text[len(start) :][-self._tail_len :])
        is_open = any(start.startswith(text) for start in self._starts)
        return _State(_Phase.START, 0, text) if is_open else _State(_Phase.FREE)

    def _next_of_reasoning(self, token_id: int) -> _State:
        state = self._state
        text = state.tail + self._vocabulary.pieces[token_id]
        if any(end in text for end in self._ends):
            return _first_state(self._after_reasoning)
        return _State(_Phase.REASONING, state.num_reasoning_tokens + 1, text[-self._tail_len :])

    @property
    def _num_over_budget(self) -> int:
        budget = self._constraint.thinking_token_budget
        return -1 if budget is None else self._state.num_reasoning_tokens - budget

    @property
    def _is_over_budget(self) -> bool:
        return self._num_over_budget >= 0

    def _fill_reasoning(self, words: IntArray) -> bool:
        forced_end = self._constraint.forced_end_ids
        if 0 <= self._num_over_budget < len(forced_end):
            set_only(words, forced_end[self._num_over_budget : self._num_over_budget + 1])
            return True
        if self._matcher is None:
            return False
        # The output must not end before its grammar has begun.
        words[:] = -1
        remove_from_mask(words, self._vocabulary.stop_ids)
        return True


def accept_all(constraints: Sequence[RowConstraint | None], token_ids: list[int]) -> bool:
    """Advance each constraint by its token, in this order; None has none. A failure is noted in its constraint.

    Returns whether all of them are still in their grammars, as before.
    """
    are_in_grammar = True
    for constraint, token_id in zip(constraints, token_ids, strict=True):
        if constraint is None:
            continue
        try:
            # Nearly every token continues a run: as `accept` does then, without its other questions.
            matcher, in_grammar = constraint._matcher, constraint._state is _IN_GRAMMAR
            if in_grammar and matcher and token_id not in constraint._stop_ids and matcher.accept(token_id):
                constraint._run += 1
                continue
            constraint.accept(token_id)
        except Exception as error:
            constraint.failure = constraint.failure or first_line(error)
        are_in_grammar = False
    return are_in_grammar


def _first_state(phase: _Phase) -> _State:
    return _IN_GRAMMAR if phase is _Phase.GRAMMAR else _State(phase)


def jump_forward_tokens(forced: bytes, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens in which the tokenizer spells the bytes with which an output continues.

    The last token of the bytes is left out: more bytes might change it.
    """
    text = forced.decode(errors="ignore")
    token_ids = _within_text(vocabulary.encode(text)[:-1], text, vocabulary) if text else []
    end = 0
    for place, token_id in enumerate(token_ids):
        piece = vocabulary.pieces[token_id]
        if not forced.startswith(piece, end):
            return token_ids[:place]
        end += len(piece)
    return token_ids


def _within_text(token_ids: list[int], text: str, vocabulary: Vocabulary) -> list[int]:
    """Return a text's tokens without the space that tokenizers of SentencePiece put before it."""
    if not token_ids or text.startswith(" "):
        return token_ids
    first, *others = token_ids
    piece = vocabulary.pieces[first]
    if piece == b" ":
        return others
    bare = vocabulary.id_by_piece.get(piece[1:]) if piece.startswith(b" ") else None
    return token_ids if bare is None else [bare, *others]
