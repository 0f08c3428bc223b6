"""Constraints: what rows do to their logits before a token is drawn from them.

The order is that of transformers' processors, which compute the same from the same logits: logit_bias,
repetition_penalty, frequency_penalty and presence_penalty (not in transformers), bad_words, min_tokens,
allowed_token_ids. Everything is of one rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.logits import apply_bias, apply_bitmask, apply_penalties
from ..proto.block_tables import IntArray
from ..proto.step import FloatArray, NewSequence, RowConstraints
from .parallel import Shard
from .token_counts import TokenCounts, num_words, packed
from .transfer import to_device

_ANY_TOKEN = -1


@dataclass(frozen=True, slots=True)
class _RowState:
    """One row's constraints as arrays, those of tokens that this rank has; what is not asked for is empty.

    Attributes:
        biased_ids, biases: [n] token ids, and what is added to their logits.
        forbidden_ids: [n] tokens that are bad words by themselves.
        word_prefixes: [w, P] int32 beginnings of longer bad words, _ANY_TOKEN before those that are shorter.
        word_lens: [w] their lengths.
        word_ends: [w] the tokens that must not follow them.
        early_stops: [n] tokens forbidden while the sequence is too short.
        allowed: [ceil(V / 32)] int32 on the device, the mask of what may be sampled; None: everything.
        penalties: repetition, frequency and presence penalty; None: none.
    """

    biased_ids: IntArray
    biases: FloatArray
    forbidden_ids: IntArray
    word_prefixes: IntArray
    word_lens: IntArray
    word_ends: IntArray
    early_stops: IntArray
    allowed: Tensor | None
    penalties: tuple[float, float, float] | None


class Constraints:
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
        row, constraints = sequence.row, sequence.sampling.constraints
        self.release(np.array([row], dtype=np.int32))
        if constraints is None:
            return
        self._num_constrained += 1
        self._states[row] = self._state_of(constraints)
        self._stop_free_len[row] = constraints.stop_free_len
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

    def concern(self, rows: IntArray, lens: IntArray) -> bool:
        """Whether any of these rows, of these lengths, changes its logits."""
        if not self._num_constrained:
            return False
        return bool(self._always[rows].any() or (lens < self._stop_free_len[rows]).any())

    def apply(self, logits: Tensor, rows: IntArray, lens: IntArray) -> None:
        """Changes logits in place.

        Args:
            logits: [N, padded_len] float32.
            rows: [N] int32.
            lens: [N] int32, each sequence's length.
        """
        if len(self._shard) == 0:
            return
        members = [(index, state) for index, row in enumerate(rows.tolist()) if (state := self._states[row])]
        self._add_biases(logits, [(index, state.biased_ids, state.biases) for index, state in members])
        self._penalise(logits, rows, members)
        self._forbid(logits, lens, rows, members)
        self._allow(logits, members)

    def _state_of(self, constraints: RowConstraints) -> _RowState:
        local = self._local
        bias = {token_id: value for token_id, value in constraints.logit_bias if local(token_id)}
        words = [word for word in constraints.bad_words if local(word[-1])]
        longer = [word for word in words if len(word) > 1]
        width = max((len(word) - 1 for word in longer), default=0)
        prefixes = [(_ANY_TOKEN,) * (width + 1 - len(word)) + word[:-1] for word in longer]
        allowed = constraints.allowed_token_ids
        return _RowState(
            biased_ids=_ints(list(bias)),
            biases=np.array(list(bias.values()), dtype=np.float32),
            forbidden_ids=_ints([word[0] for word in words if len(word) == 1]),
            word_prefixes=_ints(prefixes).reshape(len(longer), width),
            word_lens=_ints([len(word) - 1 for word in longer]),
            word_ends=_ints([word[-1] for word in longer]),
            early_stops=_ints([token_id for token_id in constraints.stop_token_ids if local(token_id)]),
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

    def _mask_of(self, token_ids: tuple[int, ...]) -> Tensor:
        local_ids = _ints([token_id - self._shard.start for token_id in token_ids if self._local(token_id)])
        return to_device(packed(local_ids, self._shard), self._device, torch.int32)

    def _add_biases(self, logits: Tensor, entries: Sequence[tuple[int, IntArray, FloatArray]]) -> None:
        """Adds to the logits of tokens; entries are (row of `logits`, token ids, values)."""
        entries = [entry for entry in entries if entry[1].size]
        if not entries:
            return
        index, token_ids, values = zip(*entries, strict=True)
        index_rows = np.repeat(index, [len(ids) for ids in token_ids])
        apply_bias(
            logits,
            to_device(index_rows, self._device, torch.int64),
            to_device(np.concatenate(token_ids), self._device, torch.int64),
            to_device(np.concatenate(values), self._device, torch.float32),
            self._shard.start,
        )

    def _penalise(self, logits: Tensor, rows: IntArray, members: list[tuple[int, _RowState]]) -> None:
        penalised = [(index, state.penalties) for index, state in members if state.penalties is not None]
        if not penalised:
            return
        index = np.array([index for index, _ in penalised])
        slots = to_device(self._counts.slots[rows[index]], self._device, torch.int64)
        repetition, frequency, presence = (
            to_device(values, self._device, torch.float32)
            for values in zip(*(penalties for _, penalties in penalised), strict=True)
        )
        is_all = len(penalised) == len(logits)
        places = to_device(index, self._device, torch.int64)
        part = logits if is_all else logits[places]
        apply_penalties(
            part, self._counts.counts, self._counts.prompt_mask, slots, repetition, frequency, presence
        )
        if not is_all:
            logits[places] = part

    def _forbid(
        self, logits: Tensor, lens: IntArray, rows: IntArray, members: list[tuple[int, _RowState]]
    ) -> None:
        """Bad words, and the ends of sequences that must go on."""
        forbidden = [(index, state.forbidden_ids) for index, state in members]
        forbidden += [
            (index, state.early_stops)
            for index, state in members
            if lens[index] < self._stop_free_len[rows[index]]
        ]
        self._add_biases(
            logits, [(index, ids, np.full(len(ids), -np.inf, np.float32)) for index, ids in forbidden]
        )
        worded = [(index, state) for index, state in members if state.word_ends.size]
        if worded:
            self._forbid_completions(logits, lens, rows, worded)

    def _forbid_completions(
        self, logits: Tensor, lens: IntArray, rows: IntArray, members: list[tuple[int, _RowState]]
    ) -> None:
        """Bad words of several tokens, in rows whose newest tokens begin one."""
        device, counts = self._device, [len(state.word_ends) for _, state in members]
        index = np.repeat([index for index, _ in members], counts)
        prefixes = _stack_right([state.word_prefixes for _, state in members])
        word_lens = np.concatenate([state.word_lens for _, state in members])
        width = prefixes.shape[1]
        starts = to_device(lens[index] - width, device, torch.int64)
        places = (starts.unsqueeze(1) + torch.arange(width, device=device)).clamp_(min=0)
        newest = self._token_ids[to_device(rows[index], device, torch.int64).unsqueeze(1), places]
        wanted = to_device(prefixes, device, torch.int32)
        completes = ((newest == wanted) | (wanted == _ANY_TOKEN)).all(dim=1)
        completes &= to_device(lens[index] >= word_lens, device, torch.bool)
        ends = np.concatenate([state.word_ends for _, state in members])
        apply_bias(
            logits,
            to_device(index, device, torch.int64),
            to_device(ends, device, torch.int64),
            torch.where(completes, -torch.inf, 0.0),
            self._shard.start,
        )

    def _allow(self, logits: Tensor, members: list[tuple[int, _RowState]]) -> None:
        masks = [(index, state.allowed) for index, state in members if state.allowed is not None]
        if not masks:
            return
        index = to_device([index for index, _ in masks], self._device, torch.int64)
        bitmask = torch.zeros(len(logits), num_words(self._shard), dtype=torch.int32, device=self._device)
        bitmask[index] = torch.stack([mask for _, mask in masks])
        apply_bitmask(logits, bitmask, index)


def _stack_right(parts: list[IntArray]) -> IntArray:
    """[n, P] arrays below each other, the narrower ones with _ANY_TOKEN before their columns."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (width - part.shape[1], 0)), constant_values=_ANY_TOKEN) for part in parts]
    )


def _ints(values: npt.ArrayLike) -> IntArray:
    return np.array(values, dtype=np.int32)
