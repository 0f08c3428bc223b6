"""TokenRelay: brings the tokens that the last pipeline stage samples to the rows of the first one.

Rows count a sampled token as soon as the step that samples it is launched: which rows sample, and at which positions,
follows from the plans. Its value comes later, straight from the last stage; only the first stage, which has the
embedding, needs it, and only before a step that computes it.

In a step with drafted tokens the last stage decides how many samples of a row count, and with them the positions of
its next step. So its verdict goes to every stage, each of which waits for it before a step of the same row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ...proto.model.parallel_split import Stage
from ...proto.step import StepPlan
from ..comm.pipeline import StageLink, TokenArrival
from ..memory.host_to_device import to_device_once
from .batch import decoding_rows
from .device_rows import DeviceRows
from .unsettled_steps import Record, SettledStep

# In a verdict, a sample that does not count.
_REJECTED = -1


# Lets the states of a step's rows be those after the samples that count, [N] bool.
Store = Callable[[npt.NDArray[np.bool_]], None]


class TokenRelay(Protocol):
    """One rank's part in bringing sampled tokens to the first stage."""

    def begin_plan(self, plan: StepPlan) -> None:
        """Prepare for the changes of rows that a plan has."""
        ...

    def complete(self, plan: StepPlan) -> None:
        """Write every token that the plan's step computes to its row; wait for it if it has not come."""
        ...

    def expect(
        self, rows: RowArray, positions: RowArray, store: Store | None, record: Record | None = None
    ) -> None:
        """Count the tokens of a step of which another stage samples them, or await which of them count.

        Args:
            rows, positions: [N], of the step's samples; with drafts a row has several.
            store: of a step with drafts, called when it is known which samples count; None without drafts.
            record: called when the rows have the tokens, also if the step samples none; None for nothing to call.
        """
        ...

    def pass_on(self, token_ids: Tensor, is_retained: Tensor | None = None) -> None:
        """Send the tokens that this stage has sampled in a step, of the rows that `expect` gets elsewhere.

        Args:
            is_retained: [N] bool, those that count; None for all, in a step without drafts.
        """
        ...

    def clear(self) -> None:
        """Forget all tokens: the rows are empty."""
        ...


class NoRelay:
    """The relay of a replica with one stage, which has the tokens where it samples them."""

    def begin_plan(self, plan: StepPlan) -> None:
        pass

    def complete(self, plan: StepPlan) -> None:
        pass

    def expect(
        self, rows: RowArray, positions: RowArray, store: Store | None, record: Record | None = None
    ) -> None:
        raise AssertionError("the rank samples the tokens itself")

    def pass_on(self, token_ids: Tensor, is_retained: Tensor | None = None) -> None:
        pass

    def clear(self) -> None:
        pass


class LastRelay(NoRelay):
    """The relay of the last stage, which sends the tokens."""

    def __init__(self, link: StageLink) -> None:
        self._link = link

    def pass_on(self, token_ids: Tensor, is_retained: Tensor | None = None) -> None:
        if is_retained is None:
            self._link.send_tokens(token_ids)
        else:
            self._link.send_tokens(token_ids.masked_fill(~is_retained, _REJECTED), to_all=True)


@dataclass(slots=True)
class _Awaited:
    """Tokens of a launched step.

    Attributes:
        rows, positions: [N].
        is_live: [R] bool, rows that have had their sequence ever since.
        arrival: of the tokens; None if the step samples none.
        store, record: as for `expect`: with drafts the arrival tells which of the samples count.
    """

    rows: RowArray
    positions: RowArray
    is_live: npt.NDArray[np.bool_]
    arrival: TokenArrival | None
    store: Store | None
    record: Record | None


class EarlyRelay(NoRelay):
    """The relay of a stage before the last one, whose rows count tokens before their values are known.

    Args:
        max_steps: most steps in flight: the tokens of earlier ones have been sent.
        reads_tokens: this is the first stage, which receives the tokens; others receive verdicts alone.
    """

    def __init__(self, rows: DeviceRows, link: StageLink, max_steps: int, *, reads_tokens: bool) -> None:
        self._rows, self._link = rows, link
        self._max_steps, self._reads_tokens = max_steps, reads_tokens
        self._awaited: deque[_Awaited] = deque()

    def begin_plan(self, plan: StepPlan) -> None:
        if plan.selected_rows.size:  # tokens of beams are replaced, so they must be there
            self._take(self._num_needed(plan.selected_rows))
        if plan.command is not None:
            self._take(len(self._awaited))
        if plan.released_rows.size:
            if self._rows.has_states:
                # A released slot may be a snapshot from now on, or another row's.
                self._take(self._num_needed(plan.released_rows, with_drafts=True))
            for step in self._awaited:
                step.is_live[plan.released_rows] = False

    def complete(self, plan: StepPlan) -> None:
        too_many = len(self._awaited) - self._max_steps
        self._take(max(too_many, self._num_needed(decoding_rows(self._rows, plan))))

    def expect(
        self, rows: RowArray, positions: RowArray, store: Store | None, record: Record | None = None
    ) -> None:
        if store is not None:
            self._rows.decoding[rows] = True  # also those whose first token this is
        else:
            self._rows.count_sampled(rows, positions)
        arrival = None
        if rows.size and (store is not None or self._reads_tokens):
            arrival = self._link.receive_tokens(rows.size)
        if arrival is not None or record is not None:
            is_live = np.ones(self._rows.lens.size, np.bool_)
            self._awaited.append(_Awaited(rows.copy(), positions.copy(), is_live, arrival, store, record))

    def clear(self) -> None:
        self._awaited.clear()

    def _num_needed(self, rows: RowArray | IntArray, *, with_drafts: bool = False) -> int:
        """Return how many of the steps, from the oldest on, have tokens of any of `rows`, or drafted ones."""
        for number in range(len(self._awaited), 0, -1):
            step = self._awaited[number - 1]
            if not (with_drafts and step.store is None) and np.isin(step.rows, rows).any():
                return number
        return 0

    def _take(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self._awaited.popleft()
            if step.arrival is not None:
                self._write(step, step.arrival.wait())
            if step.record is not None:
                step.record(SettledStep(step.is_live, self._rows.lens, np.zeros_like(self._rows.lens)))

    def _write(self, step: _Awaited, token_ids: Tensor) -> None:
        """Write the tokens that count to their rows."""
        kept = step.is_live[step.rows]
        if step.store is not None:
            is_accepted = token_ids.cpu().numpy() != _REJECTED
            step.store(is_accepted)
            kept = kept & is_accepted
        if not kept.any():
            return
        rows, positions = step.rows[kept], step.positions[kept]
        if not kept.all():
            index = to_device_once(np.flatnonzero(kept), token_ids.device)
            token_ids = token_ids.index_select(0, index)
        self._rows.write(rows, positions, token_ids)
        if step.store is not None:
            self._rows.count_sampled(rows, positions)


def make_relay(stage: Stage, rows: DeviceRows, link: StageLink, max_steps: int) -> TokenRelay:
    """Return the relay of a rank of a stage."""
    if stage.count == 1:
        return NoRelay()
    if stage.is_last:
        return LastRelay(link)
    return EarlyRelay(rows, link, max_steps, reads_tokens=stage.is_first)
