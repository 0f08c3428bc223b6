"""TokenCounts: which tokens are in the sequences of rows that penalise repeats, and how often."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...kernels.logits import WORD_BITS
from ...proto.block_tables import IntArray
from ..comm.communicator import Shard
from ..memory.host_to_device import to_device

_FEWEST_SLOTS = 4


class TokenCounts:
    """Counts of this rank's part of the vocabulary, V tokens.

    A row that penalises has a slot of device memory, and the memory doubles when the slots are used up: where no row
    penalises there is none.

    Args:
        max_len: most tokens of a sequence.

    Attributes:
        slots: [R] int64, the slot of each row; -1: none.
        counts: [slots, V], how often each token is in the answer.
        prompt_mask: [slots, ceil(V / 32)] int32, which tokens are in the prompt, as kernels.logits has masks.
    """

    def __init__(self, shard: Shard, num_rows: int, max_len: int, device: torch.device) -> None:
        dtype = torch.int16 if max_len <= torch.iinfo(torch.int16).max else torch.int32
        self._shard = shard
        self._device = device
        self._free: list[int] = []
        self.slots = np.full(num_rows, -1, dtype=np.int64)
        self.counts = torch.zeros(0, len(shard), dtype=dtype, device=device)
        self.prompt_mask = torch.zeros(0, num_words(shard), dtype=torch.int32, device=device)

    def put(self, row: int, token_ids: IntArray, num_prompt_tokens: int) -> None:
        """Counts a sequence, prompt and answer, from scratch."""
        if self.slots[row] < 0:
            self.slots[row] = self._take_slot()
        slot, local_ids = self.slots[row], token_ids - self._shard.start
        owned = (local_ids >= 0) & (local_ids < len(self._shard))
        prompt, answer = local_ids[:num_prompt_tokens], local_ids[num_prompt_tokens:]
        counts = np.bincount(answer[owned[num_prompt_tokens:]], minlength=len(self._shard))
        self.counts[slot] = to_device(counts, self._device, self.counts.dtype)
        mask = packed(prompt[owned[:num_prompt_tokens]], self._shard)
        self.prompt_mask[slot] = to_device(mask, self._device, torch.int32)

    def drop(self, row: int) -> None:
        """The row penalises no more; rows that do not are welcome, too."""
        if self.slots[row] >= 0:
            self._free.append(int(self.slots[row]))
            self.slots[row] = -1

    def append(self, rows: IntArray, token_ids: Tensor) -> None:
        """One more token in the answers of those rows that are counted.

        Args:
            token_ids: [N] int32 on the device, by row.
        """
        members = np.flatnonzero(self.slots[rows] >= 0)
        if members.size == 0 or len(self._shard) == 0:
            return
        local_ids = token_ids[to_device(members, self._device, torch.int64)].long() - self._shard.start
        owned = (local_ids >= 0) & (local_ids < len(self._shard))
        places = to_device(self.slots[rows[members]], self._device, torch.int64), local_ids.where(owned, 0)
        self.counts.index_put_(places, owned.to(self.counts.dtype), accumulate=True)

    def _take_slot(self) -> int:
        if not self._free:
            num_slots = len(self.counts)
            added = max(_FEWEST_SLOTS, num_slots)
            self.counts = torch.cat((self.counts, self.counts.new_zeros(added, self.counts.shape[1])))
            more_masks = self.prompt_mask.new_zeros(added, self.prompt_mask.shape[1])
            self.prompt_mask = torch.cat((self.prompt_mask, more_masks))
            self._free = list(range(num_slots, num_slots + added))
        return self._free.pop()


def num_words(shard: Shard) -> int:
    """Words of a mask over this rank's part of the vocabulary."""
    return -(-len(shard) // WORD_BITS)


def packed(local_ids: IntArray, shard: Shard) -> IntArray:
    """A mask of this rank's part of the vocabulary in which these tokens are set, [ceil(V / 32)] int32."""
    bits = np.zeros(num_words(shard) * WORD_BITS, dtype=np.bool_)
    bits[local_ids] = True
    return np.packbits(bits, bitorder="little").view("<i4")
