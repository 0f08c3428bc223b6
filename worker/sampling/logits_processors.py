"""LogitsProcessorState: what rows do to their logits before a token is drawn from them.

The outcome is that of transformers' processors in their order, from the same logits: logit_bias, repetition_penalty,
frequency_penalty and presence_penalty (not in transformers), bad_words, min_tokens, allowed_token_ids. What is
forbidden is a bias of -inf, which no penalty changes. Everything is of one rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from ...proto.block_tables import IntArray
from ...proto.codec import FloatArray
from ...proto.step import NewSequence, RowLogitsProcessors
from ..comm.communicator import Shard
from ..memory.host_to_device import to_device, to_device_together
from .token_counts import TokenCounts, num_words, packed

_ANY_TOKEN = -1
_NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _RowState:
    """One row's constraints as arrays, those of tokens that this rank has; what is not asked for is empty.

    A column is the place of a token's logit.

    Attributes:
        bias_columns, biases: [n], and what is added there; bad words by themselves among them.
        word_prefixes: [w, P] int32 beginnings of longer bad words, _ANY_TOKEN before those that are shorter.
        word_lens: [w] their lengths.
        word_columns: [w] of the tokens that must not follow them.
        stop_columns: [n] of tokens forbidden while the sequence is too short.
        allowed: [ceil(V / 32)] int32 on the device, the mask of what may be sampled; None: everything.
        penalties: repetition, frequency and presence penalty; None: none.
    """

    bias_columns: IntArray
    biases: FloatArray
    word_prefixes: IntArray
    word_lens: IntArray
    word_columns: IntArray
    stop_columns: IntArray
    allowed: Tensor | None
    penalties: tuple[float, float, float] | None


class LogitsProcessorState:
    """The constraints of all rows.

    Args:
        shard: this rank's part of the vocabulary; logits are [N, shard.padded_len].
        token_ids: [R, L] int32 on the device, the rows' tokens, which their owner keeps up to date.
    """

    def __init__(self, shard: Shard, token_ids: Tensor) -> None:
        num_rows, max_len = token_ids.shape
        self._shard = shard
        self._token_ids = token_ids
        self._device = token_ids.device
        self._states: list[_RowState | None] = [None] * num_rows
        self._always = np.zeros(num_rows, dtype=np.bool_)  # rows whose constraints never end
        self._stop_free_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._num_constrained = 0  # rows; most steps have none, and pay nothing
        self._counts = TokenCounts(shard, num_rows, max_len, self._device)

    def put(self, sequence: NewSequence) -> None:
        """A row has got a sequence, new or come back."""
        row, constraints = sequence.row, sequence.sampling.logits_processors
        self.release(np.array([row], dtype=np.int32))
        if constraints is None:
            return
        self._num_constrained += 1
        self._states[row] = self._state_of(constraints)
        self._stop_free_len[row] = constraints.min_len
        self._always[row] = bool(
            constraints.logit_bias
            or constraints.bad_words
            or constraints.has_penalties
            or constraints.allowed_token_ids is not None
        )
        if constraints.has_penalties:
            self._counts.put(row, sequence.token_ids, constraints.num_prompt_tokens)

    def release(self, rows: IntArray) -> None:
        """These rows constrain nothing any more."""
        if not self._num_constrained:
            return
        for row in rows.tolist():
            if self._states[row] is not None:
                self._states[row] = None
                self._counts.drop(row)
                self._num_constrained -= 1
        self._always[rows] = False
        self._stop_free_len[rows] = 0

    def append(self, rows: IntArray, token_ids: Tensor) -> None:
        """Rows have got their sampled tokens, [N] int32 on the device."""
        if self._num_constrained:
            self._counts.append(rows, token_ids)

    def adjustments(self, rows: IntArray, lens: IntArray) -> LogitsProcessors | None:
        """What these rows, of these lengths, ask of their logits; None: nothing.

        Args:
            rows: [N] int32.
            lens: [N] int32, each sequence's length.
        """
        if not self._concern(rows, lens):
            return None
        members = [(index, state) for index, row in enumerate(rows.tolist()) if (state := self._states[row])]
        return LogitsProcessors(
            len(self._shard),
            self._biases_of(rows, lens, members),
            self._penalties_of(rows, members),
            self._masks_of(len(rows), members),
        )

    def _concern(self, rows: IntArray, lens: IntArray) -> bool:
        """Whether any of these rows, of these lengths, changes its logits."""
        if not self._num_constrained or len(self._shard) == 0:
            return False
        return bool(self._always[rows].any() or (lens < self._stop_free_len[rows]).any())

    def _state_of(self, constraints: RowLogitsProcessors) -> _RowState:
        words = [word for word in constraints.bad_words if self._local(word[-1])]
        longer = [word for word in words if len(word) > 1]
        width = max((len(word) - 1 for word in longer), default=0)
        prefixes = [(_ANY_TOKEN,) * (width + 1 - len(word)) + word[:-1] for word in longer]
        biases = [(token_id, value) for token_id, value in constraints.logit_bias if self._local(token_id)]
        biases += [(word[0], -np.inf) for word in words if len(word) == 1]
        stops = [token_id for token_id in constraints.stop_token_ids if self._local(token_id)]
        allowed = constraints.allowed_token_ids
        return _RowState(
            bias_columns=self._columns([token_id for token_id, _ in biases]),
            biases=np.array([value for _, value in biases], dtype=np.float32),
            word_prefixes=_ints(prefixes).reshape(len(longer), width),
            word_lens=_ints([len(word) - 1 for word in longer]),
            word_columns=self._columns([word[-1] for word in longer]),
            stop_columns=self._columns(stops),
            allowed=None if allowed is None else self._mask_of(allowed),
            penalties=(
                constraints.repetition_penalty,
                constraints.frequency_penalty,
                constraints.presence_penalty,
            )
            if constraints.has_penalties
            else None,
        )

    def _local(self, token_id: int) -> bool:
        return self._shard.start <= token_id < self._shard.end

    def _columns(self, token_ids: list[int]) -> IntArray:
        return _ints(token_ids) - np.int32(self._shard.start)

    def _mask_of(self, token_ids: tuple[int, ...]) -> Tensor:
        columns = self._columns([token_id for token_id in token_ids if self._local(token_id)])
        return to_device(packed(columns, self._shard), self._device, torch.int32)

    def _biases_of(self, rows: IntArray, lens: IntArray, members: list[tuple[int, _RowState]]) -> Biases:
        """Biases, bad words, and the ends of sequences that must go on."""
        entries = [(index, state.bias_columns, state.biases) for index, state in members]
        entries += [
            (index, state.stop_columns, np.full(len(state.stop_columns), -np.inf, np.float32))
            for index, state in members
            if lens[index] < self._stop_free_len[rows[index]]
        ]
        # Last, because the device determines their values.
        worded = [(index, state) for index, state in members if state.word_columns.size]
        entries += [
            (index, state.word_columns, np.zeros(len(state.word_columns), np.float32))
            for index, state in worded
        ]
        index = np.repeat([index for index, _, _ in entries], [len(entry[1]) for entry in entries])
        columns = np.concatenate([columns for _, columns, _ in entries])
        values = np.concatenate([values for _, _, values in entries])
        order = np.lexsort((columns, index))
        starts = np.searchsorted(index[order], np.arange(len(rows) + 1)).astype(np.int32)
        on_device = to_device_together([starts, columns[order], values, order], self._device)
        starts_there, columns_there, values_there, order_there = on_device
        if worded:
            forbidden = self._find_completed(rows, lens, worded)
            values_there[len(values_there) - len(forbidden) :].masked_fill_(forbidden, -torch.inf)
        return Biases(starts_there, columns_there, values_there[order_there])

    def _find_completed(self, rows: IntArray, lens: IntArray, members: list[tuple[int, _RowState]]) -> Tensor:
        """Which of the members' longer bad words the newest tokens have begun, [w] bool."""
        device = self._device
        index = np.repeat([index for index, _ in members], [len(state.word_columns) for _, state in members])
        prefixes = _stack_right([state.word_prefixes for _, state in members])
        word_lens = np.concatenate([state.word_lens for _, state in members])
        width = prefixes.shape[1]
        starts, own_rows, wanted, is_long_enough = to_device_together(
            [
                (lens[index] - width).astype(np.int64),
                rows[index].astype(np.int64),
                prefixes,
                lens[index] >= word_lens,
            ],
            device,
        )
        places = (starts.unsqueeze(1) + torch.arange(width, device=device)).clamp_(min=0)
        newest = self._token_ids[own_rows.unsqueeze(1), places]
        return ((newest == wanted) | (wanted == _ANY_TOKEN)).all(dim=1) & is_long_enough

    def _penalties_of(self, rows: IntArray, members: list[tuple[int, _RowState]]) -> Penalties:
        factors = np.full((len(rows), 3), _NO_PENALTIES, dtype=np.float32)
        for index, state in members:
            factors[index] = state.penalties or _NO_PENALTIES
        slots, factors_there = to_device_together([self._counts.slots[rows], factors], self._device)
        return Penalties(slots, self._counts.counts, self._counts.prompt_mask, factors_there)

    def _masks_of(self, num_rows: int, members: list[tuple[int, _RowState]]) -> Masks:
        masks = [(index, state.allowed) for index, state in members if state.allowed is not None]
        slots = np.full(num_rows, -1, dtype=np.int64)
        slots[[index for index, _ in masks]] = np.arange(len(masks))
        words = [mask for _, mask in masks]
        no_words = torch.empty(0, num_words(self._shard), dtype=torch.int32, device=self._device)
        return Masks(to_device(slots, self._device, torch.int64), torch.stack(words) if words else no_words)


def _stack_right(parts: list[IntArray]) -> IntArray:
    """[n, P] arrays below each other, the narrower ones with _ANY_TOKEN before their columns."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (width - part.shape[1], 0)), constant_values=_ANY_TOKEN) for part in parts]
    )


def _ints(values: npt.ArrayLike) -> IntArray:
    return np.array(values, dtype=np.int32)
