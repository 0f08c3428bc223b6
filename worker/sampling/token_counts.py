"""TokenCounts: token counts of the rows that have penalties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.logits import WORD_BITS
from ...proto.block_tables import IntArray, RowArray
from ..comm.shard import Shard
from ..memory.host_to_device import to_device

_MIN_SLOTS = 4

LongArray = npt.NDArray[np.int64]


class TokenCounts:
    """Token counts over this rank's part of the vocabulary, V tokens.

    Each row with penalties has a slot of device memory. The memory doubles when all slots are in use; as long as no
    row has penalties, none is allocated.

    Args:
        max_len: most tokens of a sequence.

    Attributes:
        slots: [R] int64, the slot of each row; -1 without penalties.
        counts: [slots, V], occurrences of each token in the output.
        prompt_mask: [slots, ceil(V / 32)] int32, the tokens of the prompt as a bit mask of kernels.logits.
    """

    def __init__(self, shard: Shard, num_rows: int, max_len: int, device: torch.device) -> None:
        dtype = torch.int16 if max_len <= torch.iinfo(torch.int16).max else torch.int32
        self._shard = shard
        self._device = device
        self._free_slots: list[int] = []
        self._draft_slots: list[int] = []  # of the last `gather_slots`
        self.slots = np.full(num_rows, -1, dtype=np.int64)
        self.counts = torch.zeros(0, len(shard), dtype=dtype, device=device)
        self.prompt_mask = torch.zeros(0, num_mask_words(shard), dtype=torch.int32, device=device)

    def put(self, row: int, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Count the tokens of a sequence, prompt and output, from scratch."""
        if self.slots[row] < 0:
            self.slots[row] = self._allocate_slot()
        slot, local_ids = self.slots[row], token_ids - self._shard.start
        is_local = (local_ids >= 0) & (local_ids < len(self._shard))
        prompt, output = local_ids[:num_prompt_tokens], local_ids[num_prompt_tokens:]
        counts = np.bincount(output[is_local[num_prompt_tokens:]], minlength=len(self._shard))
        self.counts[slot] = to_device(counts, self._device, self.counts.dtype)
        mask = pack_mask(prompt[is_local[:num_prompt_tokens]], self._shard)
        self.prompt_mask[slot] = to_device(mask, self._device, torch.int32)

    def release(self, row: int) -> None:
        """Free the slot of a row, if it has one."""
        if self.slots[row] >= 0:
            self._free_slots.append(int(self.slots[row]))
            self.slots[row] = -1

    def append(self, rows: IntArray | RowArray, token_ids: Tensor) -> None:
        """Count one more output token of each row that has a slot.

        Args:
            rows: [N]; a row with several tokens repeats.
            token_ids: [N] int32 on the device, in the order of `rows`.
        """
        counted = np.flatnonzero(self.slots[rows] >= 0)
        if counted.size and len(self._shard):
            self._count(self.slots[rows[counted]], token_ids[to_device(counted, self._device, torch.int64)])

    def gather_slots(self, rows: IntArray | RowArray, newest: Callable[[RowArray], Tensor]) -> LongArray:
        """Return the slots of samples, [N]; -1 without penalties.

        A row repeats for its drafted tokens. Each repetition has a slot that counts one drafted token more than the
        slot before it, until the next call.

        Args:
            rows: [N]; the entries of a row are adjacent.
            newest: indices of samples |-> the token before each, int32 on the device.
        """
        self._free_slots += self._draft_slots
        self._draft_slots = []
        slots: LongArray = self.slots[rows]
        repeats = np.append(False, rows[1:] == rows[:-1]) & (slots >= 0)
        while repeats.any():
            # The first entries of the runs that are left: their slot is a copy of the one before.
            first = np.flatnonzero(repeats & ~np.append(False, repeats[:-1]))
            copies = np.array([self._allocate_slot() for _ in first])
            self._draft_slots += copies.tolist()
            source, target = (
                to_device(each, self._device, torch.int64) for each in (slots[first - 1], copies)
            )
            self.counts[target] = self.counts[source]
            self.prompt_mask[target] = self.prompt_mask[source]
            self._count(copies, newest(first))
            slots[first] = copies
            repeats[first] = False
        return slots

    def _count(self, slots: LongArray, token_ids: Tensor) -> None:
        """Count one more output token in each slot."""
        local_ids = token_ids.long() - self._shard.start
        is_local = (local_ids >= 0) & (local_ids < len(self._shard))
        places = to_device(slots, self._device, torch.int64), local_ids.where(is_local, 0)
        self.counts.index_put_(places, is_local.to(self.counts.dtype), accumulate=True)

    def _allocate_slot(self) -> int:
        if not self._free_slots:
            num_slots = len(self.counts)
            added = max(_MIN_SLOTS, num_slots)
            self.counts = torch.cat((self.counts, self.counts.new_zeros(added, self.counts.shape[1])))
            more_masks = self.prompt_mask.new_zeros(added, self.prompt_mask.shape[1])
            self.prompt_mask = torch.cat((self.prompt_mask, more_masks))
            self._free_slots = list(range(num_slots, num_slots + added))
        return self._free_slots.pop()


def num_mask_words(shard: Shard) -> int:
    """Return the number of 32-bit words of a mask over this rank's part of the vocabulary."""
    return -(-len(shard) // WORD_BITS)


def pack_mask(local_ids: IntArray, shard: Shard) -> IntArray:
    """Return a bit mask over this rank's part of the vocabulary with these tokens set, [ceil(V / 32)] int32."""
    bits = np.zeros(num_mask_words(shard) * WORD_BITS, dtype=np.bool_)
    bits[local_ids] = True
    return np.packbits(bits, bitorder="little").view("<i4")
