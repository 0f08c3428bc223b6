"""RowState: the state of running sequences as arrays, so that a decode step costs what changes and not what runs."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from ...proto.block_tables import IntArray

Bools = npt.NDArray[np.bool_]
NEVER = np.iinfo(np.int64).max


class RowState:
    """row |-> what changes each step. All arrays are [num_rows].

    Attributes:
        num_tokens: known tokens, prompt included.
        num_scheduled: tokens whose KV has been planned, computed or in flight; while a sampled token is in
            flight this is one ahead of num_tokens.
        num_flushed: tokens that the Sequence has; the rest, less than two blocks, is in `tail`.
        limit: number of tokens at which the sequence ends by length.
        decoding: every known token has been planned (see proto.step).
        entered_at_step: first step of the row's present sequence; NEVER when the row is free.
        is_beam: what it samples is for its beam search to choose from.
        frozen: a beam that waits for the others of its search.
        stops_at_eos, has_own_stops: which of the stop tests a sampled token needs.
        handle, gateway: whom to tell; gateway is its number in the scheduler's list.
        tail: [num_rows, block_size] int32, the newest, not yet flushed tokens.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        self.num_tokens: IntArray = np.zeros(num_rows, np.int32)
        self.num_scheduled: IntArray = np.zeros(num_rows, np.int32)
        self.num_flushed: IntArray = np.zeros(num_rows, np.int32)
        self.limit: IntArray = np.zeros(num_rows, np.int32)
        self.decoding: Bools = np.zeros(num_rows, np.bool_)
        self.entered_at_step = np.full(num_rows, NEVER, np.int64)
        self.is_beam: Bools = np.zeros(num_rows, np.bool_)
        self.frozen: Bools = np.zeros(num_rows, np.bool_)
        self.stops_at_eos: Bools = np.zeros(num_rows, np.bool_)
        self.has_own_stops: Bools = np.zeros(num_rows, np.bool_)
        self.handle = np.zeros(num_rows, np.int32)
        self.gateway: IntArray = np.zeros(num_rows, np.int32)
        self.tail: IntArray = np.zeros((num_rows, block_size), np.int32)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, token_ids: array[int], limit: int, step_id: int) -> int:
        """A free row, filled with a sequence's known tokens."""
        row = self._free.pop()
        num_tokens = len(token_ids)
        rest = num_tokens % self.block_size
        self.num_tokens[row] = num_tokens
        self.num_scheduled[row] = 0
        self.num_flushed[row] = num_tokens - rest
        self.limit[row] = limit
        self.decoding[row] = False
        self.entered_at_step[row] = step_id
        self.tail[row, :rest] = token_ids[num_tokens - rest :]
        return row

    def free(self, row: int) -> None:
        self.decoding[row] = self.frozen[row] = self.is_beam[row] = False
        self.num_scheduled[row] = 0
        self.entered_at_step[row] = NEVER
        self._free.append(row)

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """One more known token for each row, whose tail has room for it."""
        known = self.num_tokens[rows]
        self.tail[rows, known % self.block_size] = token_ids
        self.num_tokens[rows] = known + 1

    def full_tails(self, rows: IntArray) -> IntArray:
        """Those rows whose tail must be flushed before the next token comes."""
        full: IntArray = rows[self.num_tokens[rows] - self.num_flushed[rows] == self.block_size]
        return full

    def unflushed(self, row: int) -> IntArray:
        """The tokens in the row's tail, in order; a copy."""
        count = int(self.num_tokens[row] - self.num_flushed[row])
        return self.tail[row, :count].copy()
