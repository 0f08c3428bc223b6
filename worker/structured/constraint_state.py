"""ConstraintState: the constraints of all rows of a rank, and their masks in each step."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray, runs_of
from ...proto.config import ModelConfig
from ...proto.errors import first_line
from ...proto.step import FailedRow, NewSequence
from ...proto.structured_outputs import OutputConstraint
from ..comm.shard import Shard
from ..memory.device_to_host import HostCopy
from .compilation import GrammarLibrary
from .grammar import CompiledGrammar, Matcher, MatcherFailed, UnsupportedConstraint, add_to_mask, num_words
from .match_time import TOO_SLOW, MatchTime, is_too_slow
from .row_constraint import RowConstraint, accept_all

# Bytes of compiled grammars that are kept for later sequences.
MAX_RETAINED_BYTES = 64 << 20
# Words of a mask that are looked at first.
_NUM_HEAD_WORDS = 16

_log = logging.getLogger(__name__)

DraftReader = Callable[[int, int], list[int]]


@dataclass(frozen=True, slots=True)
class ConstraintMasks:
    """Masks of n rows of a step.

    Attributes:
        index: [n] the indices of these rows among those of the step, ascending. The same object as in the step before
            if the same rows have masks.
        words: [n, ceil(V / 32)] int32, masks of the allowed tokens of this rank.
        at_end: indices of the rows that can only end.
    """

    index: list[int]
    words: IntArray
    at_end: frozenset[int]


NO_MASKS = ConstraintMasks([], np.zeros((0, 0), dtype=np.int32), frozenset())


@dataclass(slots=True)
class _Batch:
    """Rows whose masks one call of a library fills.

    Attributes:
        places: of each row's mask among those of the step.
    """

    rows: list[int] = field(default_factory=list)
    matchers: list[Matcher] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def add(self, row: int, matcher: Matcher, place: int) -> None:
        self.rows.append(row)
        self.matchers.append(matcher)
        self.places.append(place)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The masks of a step whose constrained rows are all in their grammars, without drafts.

    It is that of the next step as well, if this one has the same rows and none of them has left its grammar.

    Attributes:
        rows: bytes of the indices of the step's rows.
        index: as in ConstraintMasks.
        batches: all constrained rows.
    """

    rows: bytes
    index: list[int]
    batches: Mapping[type[Matcher], _Batch]


class ConstraintState:
    """The constraints of R rows.

    Every rank has them and advances them by the same sampled tokens, so that no mask is sent. On a GPU the host
    waits for the tokens of the previous step before it makes masks, while the device computes this step's logits.

    Args:
        shard: this rank's part of the vocabulary, which the masks cover.
    """

    def __init__(
        self, model: ModelConfig, shard: Shard, num_rows: int, match_time: MatchTime | None = None
    ) -> None:
        self._library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
        self._shard = shard
        self._rows: list[RowConstraint | None] = [None] * num_rows
        # Those that were asked for, also of a row whose own has failed.
        self._requested: list[OutputConstraint | None] = [None] * num_rows
        self._num_rows = 0
        self._is_constrained = np.zeros(num_rows, dtype=np.bool_)
        self._grammars = GrammarCache(self._library)
        self._stops: IntArray | None = None  # mask of the tokens that end an output, once it is needed
        self._others: IntArray = NO_MASKS.words  # and of all other tokens
        # Sampled tokens that the device may still compute, and the constraints that they advance.
        self._layout: _Layout | None = None
        self._failures: list[FailedRow] = []
        self._pending: list[tuple[list[RowConstraint | None], HostCopy]] = []
        self._match_time = match_time or MatchTime()

    def put(self, sequence: NewSequence) -> None:
        """Set the constraint of a row, whose earlier one was released, to that of a new, resumed or forked sequence.

        Raises:
            ValueError: the sequence is forked from a row without a constraint.
        """
        source = sequence.source_row if sequence.takes_constraint else None
        constraint = sequence.sampling.constraint
        if source is not None:
            constraint = self._requested[source]
            if constraint is None:
                raise ValueError(
                    f"row {sequence.row} is to have the constraint of row {source}, which has none"
                )
        if constraint is None:
            return
        output = sequence.token_ids[constraint.num_prompt_tokens - sequence.num_source_tokens :].tolist()
        forked = None if source is None else self._fork(source, output)
        self._layout = None
        self._rows[sequence.row] = forked or self._replay(constraint, output)
        self._requested[sequence.row] = constraint
        self._is_constrained[sequence.row] = True
        self._num_rows += 1

    def _fork(self, source: int, output: list[int]) -> RowConstraint | None:
        """Return the constraint of a sequence that is forked from a row. Returns None if it must be replayed.

        A copy takes 2 us; matching 400 tokens again takes 330 us.
        """
        parent = self._rows[source]
        if parent is None or not output:
            return None
        self._settle()
        return parent.fork(output)

    def _replay(self, constraint: OutputConstraint, output: list[int]) -> RowConstraint:
        row = self._make(constraint)
        with self._match_time.step(), self._match_time.row(row, len(output)):
            accept_all([row] * len(output), output)
        return row

    def release(self, rows: IntArray) -> None:
        """Remove the constraints of rows."""
        if not self._num_rows:
            return
        for row in rows[self._is_constrained[rows]].tolist():
            self._layout = None
            self._rows[row] = self._requested[row] = None
            self._num_rows -= 1
        self._is_constrained[rows] = False

    def append(self, rows: IntArray | RowArray, token_ids: Tensor) -> None:
        """Advance by the sampled tokens of rows, [N] int32 on the device, in the order of `rows`."""
        if self._num_rows and self._is_constrained[rows].any():
            self._pending.append(([self._rows[row] for row in rows.tolist()], HostCopy([token_ids])))

    def replace_newest(self, rows: IntArray, token_ids: IntArray) -> None:
        """Replace the newest tokens of rows."""
        if not self._num_rows:
            return
        self._settle()
        self._layout = None
        constraints = [self._rows[row] for row in rows.tolist()]
        for constraint in constraints:
            if constraint is not None:
                constraint.rollback(1)
        accept_all(constraints, token_ids.tolist())

    def has_effect(self, rows: IntArray | RowArray) -> bool:
        """Return whether any of the rows may have a mask."""
        return bool(self._num_rows) and bool(self._is_constrained[rows].any())

    def masks(self, rows: IntArray | RowArray, read_drafts: DraftReader) -> ConstraintMasks:
        """Return the masks of the rows' next tokens.

        Args:
            rows: [N]; a row with drafted tokens repeats: for its newest token, then for each drafted one.
            read_drafts: (first index, count of drafts) |-> the drafted tokens of the row at this index.
        """
        key = rows.tobytes()
        is_as_before = self._layout is not None and self._layout.rows == key
        if not (is_as_before or self.has_effect(rows)):
            return NO_MASKS
        with self._match_time.step():
            self._settle()
            if is_as_before and self._layout is not None:
                index, batches = self._layout.index, self._layout.batches
                words = self._new_words(len(index))
            else:
                index, batches, words = self._lay_out(rows, read_drafts)
            for kind, batch in batches.items():
                self._fill_together(kind, batch, words)
        if self._match_time.is_watching:
            self._fail_slow(rows)
        if not index:
            return NO_MASKS
        at_end = self._complete(words)
        return ConstraintMasks(index, self._local(words), frozenset(index[place] for place in at_end))

    def _new_words(self, num_masks: int) -> IntArray:
        return np.empty((num_masks, num_words(self._shard.full_len)), dtype=np.int32)

    def _lay_out(
        self, rows: IntArray | RowArray, read_drafts: DraftReader
    ) -> tuple[list[int], Mapping[type[Matcher], _Batch], IntArray]:
        """Fill the masks of rows that are not to be filled together.

        Returns:
            The indices of all rows with masks, the batches that are to be filled, and the masks.
        """
        index: list[int] = []
        words, is_steady = self._new_words(len(rows)), True
        batches: defaultdict[type[Matcher], _Batch] = defaultdict(_Batch)
        starts, counts = runs_of(rows)
        for first, count, row in zip(starts.tolist(), counts.tolist(), rows[starts].tolist(), strict=True):
            constraint = self._rows[row]
            if constraint is None:
                continue
            if count == 1 and (matcher := constraint.matcher_in_grammar) is not None:
                batches[type(matcher)].add(row, matcher, len(index))
                index.append(first)
                continue
            is_steady = False
            try:
                if constraint.failure:
                    raise MatcherFailed(constraint.failure)
                with self._measured(constraint):
                    if count == 1:
                        if constraint.fill_mask(words[len(index)]):
                            index.append(first)
                    elif constraint.is_active:
                        own = words[len(index) : len(index) + count]
                        constraint.fill_masks(read_drafts(first, count - 1), own)
                        index.extend(range(first, first + count))
            except Exception as error:  # of one output, which must not end the step of all
                self._fail(row, first_line(error))
        self._layout = _Layout(rows.tobytes(), index, batches) if is_steady else None
        return index, batches, words[: len(index)]

    def _fill_together(self, kind: type[Matcher], batch: _Batch, words: IntArray) -> None:
        """Fill the masks of rows by one call; one by one if any fails, which leaves its row without a constraint."""
        if not self._match_time.is_watching:
            try:
                kind.fill_masks(batch.matchers, words, batch.places)
                return
            except Exception as error:
                _log.debug("filling masks one by one: %s", first_line(error))
        for row, matcher, place in zip(batch.rows, batch.matchers, batch.places, strict=True):
            constraint = self._rows[row]
            assert constraint is not None, "the batch has constrained rows only"
            try:
                with self._measured(constraint):
                    matcher.fill_mask(words[place])
            except Exception as error:
                words[place] = -1
                self._fail(row, first_line(error))

    def _measured(self, constraint: RowConstraint) -> AbstractContextManager[None]:
        return self._match_time.row(constraint) if self._match_time.is_watching else nullcontext()

    def jump_forward_ids(self, row: int, max_tokens: int) -> list[int]:
        """Return the tokens that the constraint of a row leaves no choice of, as far as the tokenizer tells."""
        constraint = self._rows[row]
        if constraint is None:
            return []
        self._settle()
        try:
            return constraint.jump_forward_ids(max_tokens)
        except Exception as error:
            constraint.failure = constraint.failure or first_line(error)
            self._layout = None
            return []

    def _settle(self) -> None:
        """Advance by the tokens that were sampled since."""
        for constraints, copied in self._pending:
            (token_ids,) = copied.wait()
            accept = self._accept_measured if self._match_time.is_watching else accept_all
            if not accept(constraints, token_ids.tolist()):
                self._layout = None
        self._pending.clear()

    def _accept_measured(self, constraints: Sequence[RowConstraint | None], token_ids: list[int]) -> bool:
        """Do the same as `accept_all`, and measure each row."""
        are_in_grammar = True
        for constraint, token_id in zip(constraints, token_ids, strict=True):
            if constraint is not None:
                with self._match_time.row(constraint, num_tokens=1):
                    are_in_grammar &= accept_all([constraint], [token_id])
        return are_in_grammar

    def _fail_slow(self, rows: IntArray | RowArray) -> None:
        """End the requests whose matchers take too long.

        Rank 0 alone decides: another rank that leaves out a mask, whose request then goes on, would sample tokens
        that the constraint does not allow.
        """
        if self._shard.rank != 0:
            return
        for row in set(rows.tolist()):
            constraint = self._rows[row]
            if constraint is not None and is_too_slow(constraint):
                self._fail(row, TOO_SLOW)

    def _fail(self, row: int, reason: str) -> None:
        """Remove the constraint of a row, whose request the scheduler ends."""
        self._rows[row] = self._layout = None
        self._failures.append(FailedRow(row, "structured_outputs", reason))
        _log.error("a structured output cannot go on: %s", reason)

    def take_failures(self) -> tuple[FailedRow, ...]:
        """Return the rows whose constraints have failed since the last call."""
        failures = tuple(self._failures)
        self._failures.clear()
        return failures

    def _make(self, constraint: OutputConstraint) -> RowConstraint:
        matcher: Matcher | None = None
        if constraint.grammar:
            try:
                matcher = self._grammars.load(constraint.grammar).new_matcher()
            except (ValueError, ImportError, UnsupportedConstraint) as error:
                # The gateway has loaded it, so the libraries of this rank are missing or of another version.
                row = RowConstraint(constraint, None, self._library.vocabulary)
                row.failure = f"the rank cannot read the grammar: {first_line(error)}"
                return row
        return RowConstraint(constraint, matcher, self._library.vocabulary)

    def _complete(self, words: IntArray) -> list[int]:
        """Allow the end where nothing else is; return the masks that allow no more than that."""
        if self._stops is None:
            self._stops = np.zeros(words.shape[1], dtype=np.int32)
            add_to_mask(self._stops, self._library.vocabulary.stop_ids)
            self._others = ~self._stops
        # Most masks allow one of the first tokens, and 16 words are read sooner than the 1,000 of 32,000 tokens.
        if (words[:, :_NUM_HEAD_WORDS] & self._others[:_NUM_HEAD_WORDS]).any(axis=1).all():
            return []
        has_others = (words & self._others).any(axis=1)
        at_end: list[int] = np.flatnonzero(~has_others).tolist()
        for place in at_end:
            if not words[place].any():
                words[place] = self._stops
        return at_end

    def _local(self, words: IntArray) -> IntArray:
        """Return the bits of this rank's tokens, of masks [n, ceil(V / 32)] of the whole vocabulary."""
        start, end = self._shard.start, self._shard.end
        if start % 32 == 0:
            return np.ascontiguousarray(words[:, start // 32 : -(-end // 32)])
        padded = np.zeros((len(words), num_words(end - start) * 32), dtype=np.uint8)
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
        padded[:, : end - start] = bits[:, start:end]
        return np.packbits(padded, axis=1, bitorder="little").view("<i4")


class GrammarCache:
    """Grammars that were loaded last, up to MAX_RETAINED_BYTES of their compiled form."""

    def __init__(self, library: GrammarLibrary) -> None:
        self._library = library
        self._loaded: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0

    def load(self, compiled: bytes) -> CompiledGrammar:
        """Return a grammar. Raises ValueError and ImportError as GrammarLibrary does."""
        grammar = self._loaded.get(compiled)
        if grammar is not None:
            self._loaded.move_to_end(compiled)
            return grammar
        grammar = self._loaded[compiled] = self._library.load(compiled)
        self._num_bytes += len(compiled)
        while self._num_bytes > MAX_RETAINED_BYTES and len(self._loaded) > 1:
            oldest, _ = self._loaded.popitem(last=False)
            self._num_bytes -= len(oldest)
        return grammar
