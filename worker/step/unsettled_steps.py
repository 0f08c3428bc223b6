"""UnsettledSteps: launched steps of which a GPU has not told the host yet how many drafted tokens it accepted.

The host goes on without waiting for the verdict of a step with drafts. It counts what is certain, one new token of
each row. Until a step is *settled*, the accepted drafted tokens are known on the device only, which adds them to the
positions of the next step. When the step after that one is launched, the verdict has come: the scheduler, which has
two steps in flight, has made that plan from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray
from ..memory.device_to_host import HostCopy
from ..memory.host_to_device import to_device

if TYPE_CHECKING:
    from .batch import Batch


class SettledStep(NamedTuple):
    """A step of which the host knows the samples that count.

    Attributes:
        is_live: [R] bool, rows that have had their sequence ever since.
        lens: [R] int32, tokens of each row after the step.
        shifts: [R] int32, by how much the positions of the step's batch on the host are too low.
    """

    is_live: npt.NDArray[np.bool_]
    lens: IntArray
    shifts: IntArray


# Records a step whose tokens the rows have.
Record = Callable[[SettledStep], None]


@dataclass(slots=True)
class _Step:
    """An unsettled step.

    Attributes:
        outcome: what is known so far.
        accepted: [R] int32 on the device, the accepted drafted tokens of each row; None of a step without drafts,
            which follows one with drafts.
        verdict: whose first array tells which samples count, [N] bool.
        record: called when the step is settled.
    """

    batch: Batch
    outcome: SettledStep
    accepted: Tensor | None = None
    verdict: HostCopy | None = None
    record: Record | None = None


class UnsettledSteps:
    """The unsettled steps of a rank, oldest first; none on a CPU.

    Args:
        lens, num_computed: [R] int32, of DeviceRows; settling a step adds the accepted drafted tokens.
    """

    def __init__(self, lens: IntArray, num_computed: IntArray) -> None:
        self._lens, self._num_computed = lens, num_computed
        self._steps: deque[_Step] = deque()

    @property
    def accepted(self) -> Tensor | None:
        """Return the tokens of each row that the host does not count yet, [R] int32 on the device; None for none."""
        return next((step.accepted for step in reversed(self._steps) if step.accepted is not None), None)

    @property
    def max_accepted(self) -> int:
        """Return the most tokens of a row that the host does not count yet."""
        return max((int(step.batch.row_lens.max()) - 1 for step in self._steps if step.verdict), default=0)

    def is_newest(self, batch: Batch) -> bool:
        """Return whether the verdict of a step is the one that the host does not know."""
        return bool(self._steps) and self._steps[-1].batch is batch and self._steps[-1].verdict is not None

    def add(self, batch: Batch, accepted: Tensor, verdict: HostCopy) -> None:
        """Add a step, whose rows have counted one token each.

        Args:
            accepted, verdict: as in _Step.
        """
        self._steps.append(_Step(batch, self._outcome(), accepted, verdict))

    def defer(self, batch: Batch, record: Record) -> bool:
        """Call `record` when a step is settled, the last one that was launched. Returns False if it is settled."""
        if not self._steps:
            return False
        if self._steps[-1].batch is not batch:
            self._steps.append(_Step(batch, self._outcome()))
        self._steps[-1].record = record
        return True

    def forget(self, rows: IntArray) -> None:
        """Forget the sequences of rows that were emptied."""
        if not self._steps or not rows.size:
            return
        for step in self._steps:
            step.outcome.is_live[rows] = False
        if (accepted := self.accepted) is not None:
            accepted.index_fill_(0, to_device(rows, accepted.device, torch.int64), 0)

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def settle_older(self) -> None:
        """Settle all steps but that of the newest verdict; the device computes it while the host waits for them."""
        while self._steps and (len(self._steps) > 1 or self._steps[0].verdict is None):
            self._settle_first()

    def settle(self) -> None:
        """Settle all steps; the host waits for the device."""
        while self._steps:
            self._settle_first()

    def _settle_first(self) -> None:
        step = self._steps.popleft()
        outcome = step.outcome
        if step.verdict is not None:
            is_retained = step.verdict.wait()[0]
            counts = np.bincount(step.batch.sampled_rows[is_retained], minlength=self._lens.size)
            gained = (np.maximum(counts - 1, 0) * outcome.is_live).astype(np.int32)
            self._lens += gained
            self._num_computed += gained
            for each in (outcome, *(later.outcome for later in self._steps)):
                each.lens[:] += gained
            for later in self._steps:
                later.outcome.shifts[:] += gained
        if step.record is not None:
            step.record(outcome)

    def _outcome(self) -> SettledStep:
        return SettledStep(np.ones(self._lens.size, np.bool_), self._lens.copy(), np.zeros_like(self._lens))
