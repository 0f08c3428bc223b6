"""LogitsProcessorState: penalties, biases and masks that rows apply to their logits before sampling.

The result equals that of transformers' logits processors in their order, from the same logits: logit_bias,
repetition_penalty, frequency_penalty and presence_penalty (not in transformers), bad_words, min_tokens,
allowed_token_ids, structured_outputs. A forbidden token has a bias of -inf, which no penalty changes. All arrays
cover one rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.logits import Biases, LogitsProcessors, Masks, Penalties
from ...proto.block_tables import IntArray, RowArray
from ...proto.codec import FloatArray
from ...proto.step import FailedRow, NewSequence, RowLogitsProcessors
from ..comm.shard import Shard
from ..memory.host_to_device import to_device, to_device_once, to_device_together
from ..structured.constraint_state import ConstraintMasks, ConstraintState
from .custom_processors import CustomProcessors
from .token_counts import TokenCounts, num_mask_words, pack_mask

_ANY_TOKEN = -1
_NO_PENALTIES = (1.0, 0.0, 0.0)
_NO_COLUMNS: IntArray = np.zeros(0, dtype=np.int32)
_NO_BIASES: FloatArray = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _RowProcessors:
    """One row's processors as arrays, for the tokens of this rank only; a processor that is off is empty.

    A column is the index of a token's logit on this rank.

    Attributes:
        bias_columns, biases: [n], biased tokens and what is added to them; -inf for bad words of one token.
        prefixes: [w, P] int32, the longer bad words without their last token, padded on the left with _ANY_TOKEN.
        prefix_lens: [w], their lengths without padding.
        last_columns: [w], of the last tokens of the longer bad words.
        stop_columns: [n], of tokens forbidden until the sequence has its minimum length.
        allowed: [ceil(V / 32)] int32 on the device, mask of the allowed tokens; None if all are.
        penalties: repetition, frequency and presence penalty; None if the row has none.
    """

    bias_columns: IntArray
    biases: FloatArray
    prefixes: IntArray
    prefix_lens: IntArray
    last_columns: IntArray
    stop_columns: IntArray
    allowed: Tensor | None
    penalties: tuple[float, float, float] | None


class LogitsProcessorState:
    """The logits processors of all rows.

    Args:
        shard: this rank's part of the vocabulary; logits are [N, shard.padded_len].
        token_ids: [R, L] int32 on the device, the tokens of all rows, kept up to date by DeviceRows.
        constraints: of the rows' outputs.
        custom: processors of others.
    """

    def __init__(
        self, shard: Shard, token_ids: Tensor, constraints: ConstraintState, custom: CustomProcessors
    ) -> None:
        num_rows, max_len = token_ids.shape
        self._shard = shard
        self._token_ids = token_ids
        self._constraints = constraints
        self._custom = custom
        self._device = token_ids.device
        self._rows: list[_RowProcessors | None] = [None] * num_rows
        self._is_permanent = np.zeros(num_rows, dtype=np.bool_)  # rows with a processor besides min_len
        self._follows = np.zeros(
            num_rows, dtype=np.bool_
        )  # rows with a processor that depends on their tokens
        self._min_len: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._num_active = 0  # rows with processors; a step without any does no work here
        # No biases, slots and factors of no penalties, for the last number of rows that had only masks.
        self._nothing: tuple[Biases, Tensor, Tensor] | None = None
        # Slots of the masks of the last step in which rows had only those of constraints; the rows, and their number.
        self._mask_slots: tuple[list[int], int, Tensor] | None = None
        self._counts = TokenCounts(shard, num_rows, max_len, self._device)

    def put(self, sequence: NewSequence) -> None:
        """Set the processors of a row to those of a new or resumed sequence."""
        row, processors = sequence.row, sequence.sampling.logits_processors
        self.release(np.array([row], dtype=np.int32))
        self._constraints.put(sequence)
        self._custom.put(sequence)
        if processors is None:
            return
        self._num_active += 1
        self._rows[row] = self._make_row(processors)
        self._min_len[row] = processors.min_len
        self._follows[row] = bool(
            processors.has_penalties
            or processors.extra_args
            or any(len(word) > 1 for word in processors.bad_words)
        )
        self._is_permanent[row] = bool(
            processors.logit_bias
            or processors.bad_words
            or processors.has_penalties
            or processors.allowed_token_ids is not None
        )
        if processors.has_penalties:
            self._counts.put(row, sequence.token_ids, processors.num_prompt_tokens)

    def release(self, rows: IntArray) -> None:
        """Remove the processors of rows."""
        self._constraints.release(rows)
        self._custom.release(rows)
        if not self._num_active:
            return
        for row in rows.tolist():
            if self._rows[row] is not None:
                self._rows[row] = None
                self._counts.release(row)
                self._num_active -= 1
        self._is_permanent[rows] = self._follows[rows] = False
        self._min_len[rows] = 0

    def append(self, rows: IntArray | RowArray, token_ids: Tensor) -> None:
        """Count the sampled tokens of rows, [N] int32 on the device."""
        if self._num_active:
            self._counts.append(rows, token_ids)
        self._constraints.append(rows, token_ids)

    def replace_newest(self, rows: IntArray, token_ids: IntArray) -> None:
        """Replace the newest tokens of rows. Beams, whose tokens are replaced, have no penalties."""
        self._constraints.replace_newest(rows, token_ids)

    def follow(self, rows: IntArray | RowArray, lens: IntArray | RowArray) -> bool:
        """Return whether the host must know each token of some rows of given lengths before their next step."""
        if self._constraints.has_effect(rows):
            return True
        return self._num_active > 0 and bool((self._follows[rows] | (lens < self._min_len[rows])).any())

    def jump_forward_ids(self, row: int, max_tokens: int) -> list[int]:
        """Return the next tokens that the constraint of a row leaves no choice of."""
        return self._constraints.jump_forward_ids(row, max_tokens)

    def apply_custom(self, logits: Tensor, rows: IntArray | RowArray, lens: IntArray | RowArray) -> Tensor:
        """Return the logits after the custom processors of rows; see CustomProcessors.apply."""
        return self._custom.apply(logits, rows, lens)

    def take_failures(self) -> tuple[FailedRow, ...]:
        """Return the rows whose constraints or custom processors have failed since the last call."""
        return self._constraints.take_failures() + self._custom.take_failures()

    def gather(self, rows: IntArray | RowArray, lens: IntArray | RowArray) -> LogitsProcessors | None:
        """Return the processors of rows for one step. Returns None if no row has any in effect.

        Args:
            rows: [N]; a row with drafted tokens repeats, by ascending length.
            lens: [N], each sequence's length.
        """
        # Advances the constraints of every rank, also of one without tokens.
        masks = self._gather_constraints(rows, lens)
        if not masks.index and not self._has_effect(rows, lens):
            return None
        members = [
            (index, processors)
            for index, row in enumerate(rows.tolist() if self._num_active else ())
            if (processors := self._rows[row]) is not None
        ]
        if not members:
            return self._only_masks(len(rows), masks)
        return LogitsProcessors(
            len(self._shard),
            self._gather_biases(rows, lens, members, masks.at_end),
            self._gather_penalties(rows, lens, members),
            self._gather_masks(len(rows), members, masks),
        )

    def _gather_constraints(self, rows: IntArray | RowArray, lens: IntArray | RowArray) -> ConstraintMasks:
        """Return the masks of the rows' constraints."""

        def read_drafts(first: int, count: int) -> list[int]:
            start = int(lens[first])
            return [
                int(token_id) for token_id in self._token_ids[rows[first], start : start + count].tolist()
            ]

        return self._constraints.masks(rows, read_drafts)

    def _has_effect(self, rows: IntArray | RowArray, lens: IntArray | RowArray) -> bool:
        if not self._num_active or len(self._shard) == 0:
            return False
        return bool(self._is_permanent[rows].any() or (lens < self._min_len[rows]).any())

    def _make_row(self, processors: RowLogitsProcessors) -> _RowProcessors:
        words = [word for word in processors.bad_words if self._is_local(word[-1])]
        longer = [word for word in words if len(word) > 1]
        width = max((len(word) - 1 for word in longer), default=0)
        prefixes = [(_ANY_TOKEN,) * (width + 1 - len(word)) + word[:-1] for word in longer]
        biases = [(token_id, value) for token_id, value in processors.logit_bias if self._is_local(token_id)]
        biases += [(word[0], -np.inf) for word in words if len(word) == 1]
        stops = [token_id for token_id in processors.stop_token_ids if self._is_local(token_id)]
        allowed = processors.allowed_token_ids
        penalties = (
            processors.repetition_penalty,
            processors.frequency_penalty,
            processors.presence_penalty,
        )
        return _RowProcessors(
            bias_columns=self._columns([token_id for token_id, _ in biases]),
            biases=np.array([value for _, value in biases], dtype=np.float32),
            prefixes=_ints(prefixes).reshape(len(longer), width),
            prefix_lens=_ints([len(word) - 1 for word in longer]),
            last_columns=self._columns([word[-1] for word in longer]),
            stop_columns=self._columns(stops),
            allowed=None if allowed is None else self._make_mask(allowed),
            penalties=penalties if processors.has_penalties else None,
        )

    def _is_local(self, token_id: int) -> bool:
        return self._shard.start <= token_id < self._shard.end

    def _columns(self, token_ids: list[int]) -> IntArray:
        return _ints(token_ids) - np.int32(self._shard.start)

    def _make_mask(self, token_ids: tuple[int, ...]) -> Tensor:
        columns = self._columns([token_id for token_id in token_ids if self._is_local(token_id)])
        return to_device(pack_mask(columns, self._shard), self._device, torch.int32)

    def _gather_biases(
        self,
        rows: IntArray | RowArray,
        lens: IntArray | RowArray,
        members: list[tuple[int, _RowProcessors]],
        at_end: frozenset[int],
    ) -> Biases:
        """Return logit biases, bad words, and stop tokens of sequences below their minimum length.

        Args:
            at_end: indices of the rows that can only end, whatever their length.
        """
        entries = [(0, _NO_COLUMNS, _NO_BIASES)]  # there may be no others
        entries += [(index, row.bias_columns, row.biases) for index, row in members]
        entries += [
            (index, row.stop_columns, np.full(len(row.stop_columns), -np.inf, np.float32))
            for index, row in members
            if lens[index] < self._min_len[rows[index]] and index not in at_end
        ]
        # Longer bad words come last: the device determines their values.
        with_prefixes = [(index, row) for index, row in members if row.last_columns.size]
        entries += [
            (index, row.last_columns, np.zeros(len(row.last_columns), np.float32))
            for index, row in with_prefixes
        ]
        index = np.repeat([index for index, _, _ in entries], [len(entry[1]) for entry in entries])
        columns = np.concatenate([columns for _, columns, _ in entries])
        values = np.concatenate([values for _, _, values in entries])
        order = np.lexsort((columns, index))
        starts = np.searchsorted(index[order], np.arange(len(rows) + 1)).astype(np.int32)
        device_starts, device_columns, device_values, device_order = to_device_together(
            [starts, columns[order], values, order], self._device
        )
        if with_prefixes:
            forbidden = self._match_prefixes(rows, lens, with_prefixes)
            device_values[len(device_values) - len(forbidden) :].masked_fill_(forbidden, -torch.inf)
        return Biases(device_starts, device_columns, device_values[device_order])

    def _match_prefixes(
        self, rows: IntArray | RowArray, lens: IntArray | RowArray, members: list[tuple[int, _RowProcessors]]
    ) -> Tensor:
        """Return whether the newest tokens of a row equal the prefix of each of its longer bad words, [w] bool."""
        device = self._device
        index = np.repeat([index for index, _ in members], [len(row.last_columns) for _, row in members])
        prefixes = _stack_right_aligned([row.prefixes for _, row in members])
        prefix_lens = np.concatenate([row.prefix_lens for _, row in members])
        width = prefixes.shape[1]
        starts, prefix_rows, expected, is_long_enough = to_device_together(
            [
                (lens[index] - width).astype(np.int64),
                rows[index].astype(np.int64),
                prefixes,
                lens[index] >= prefix_lens,
            ],
            device,
        )
        positions = (starts.unsqueeze(1) + torch.arange(width, device=device)).clamp_(min=0)
        newest = self._token_ids[prefix_rows.unsqueeze(1), positions]
        return ((newest == expected) | (expected == _ANY_TOKEN)).all(dim=1) & is_long_enough

    def _gather_penalties(
        self, rows: IntArray | RowArray, lens: IntArray | RowArray, members: list[tuple[int, _RowProcessors]]
    ) -> Penalties:
        def newest(index: RowArray) -> Tensor:
            places = to_device_together([rows[index], lens[index] - 1], self._device)
            return self._token_ids[places[0].long(), places[1].long()]

        factors = np.full((len(rows), 3), _NO_PENALTIES, dtype=np.float32)
        for index, row in members:
            factors[index] = row.penalties or _NO_PENALTIES
        slots, device_factors = to_device_together(
            [self._counts.gather_slots(rows, newest), factors], self._device
        )
        return Penalties(slots, self._counts.counts, self._counts.prompt_mask, device_factors)

    def _only_masks(self, num_rows: int, masks: ConstraintMasks) -> LogitsProcessors:
        """Return the processors of rows that have masks of constraints at most."""
        if self._nothing is None or len(self._nothing[1]) != num_rows:
            starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device)
            self._nothing = (
                Biases(starts, starts[:0], torch.zeros(0, device=self._device)),
                torch.full((num_rows,), -1, dtype=torch.int64, device=self._device),
                torch.tensor([_NO_PENALTIES] * num_rows, device=self._device),
            )
        biases, slots, factors = self._nothing
        penalties = Penalties(slots, self._counts.counts, self._counts.prompt_mask, factors)
        known = self._mask_slots
        if known is None or known[0] is not masks.index or known[1] != num_rows:
            own = np.full(num_rows, -1, dtype=np.int64)
            own[masks.index] = np.arange(len(masks.index))
            known = self._mask_slots = masks.index, num_rows, to_device(own, self._device, torch.int64)
        words = to_device_once(masks.words, self._device)
        return LogitsProcessors(len(self._shard), biases, penalties, Masks(known[2], words))

    def _gather_masks(
        self, num_rows: int, members: list[tuple[int, _RowProcessors]], masks: ConstraintMasks
    ) -> Masks:
        """Return the masks of rows: allowed_token_ids of `members`, and the masks of constraints."""
        words = [row.allowed for _, row in members if row.allowed is not None]
        slots = np.full(num_rows, -1, dtype=np.int64)
        slots[[index for index, row in members if row.allowed is not None]] = np.arange(len(words))
        # A request has at most one of the two.
        slots[masks.index] = len(words) + np.arange(len(masks.index))
        parts = [torch.stack(words)] if words else []
        if masks.index:
            parts.append(to_device_once(masks.words, self._device))
        if not parts:
            parts.append(torch.empty(0, num_mask_words(self._shard), dtype=torch.int32, device=self._device))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Masks(to_device(slots, self._device, torch.int64), joined)


def _stack_right_aligned(parts: list[IntArray]) -> IntArray:
    """Stack [n, P] arrays along the first dimension, narrower ones padded on the left with _ANY_TOKEN."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (width - part.shape[1], 0)), constant_values=_ANY_TOKEN) for part in parts]
    )


def _ints(values: npt.ArrayLike) -> IntArray:
    return np.array(values, dtype=np.int32)
