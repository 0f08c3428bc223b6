"""StepDraft: a plan under construction."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....proto.block_tables import IntArray, RowArray
from ....proto.codec import NO_INTS
from ....proto.step import NewSequence
from ..steps.in_flight import NO_ROWS


@dataclass(slots=True)
class StepDraft:
    """A plan under construction.

    Attributes:
        num_tokens_left: tokens that the step may still compute.
        full_partitions: partitions whose running sequences lack blocks: no sequence starts there.
        grown_rows, grown_ids: tables of rows at a block boundary, and the next block of each. They go before
            `appended_rows`. Arrays, which a plan with nothing else appended takes as they are (64 rows: 0.4 us,
            through lists 7 us).
        appended_rows, appended_ids: tables that grow, and their blocks.
        first_rows: rows that will sample their first token after a prefill.
        pooled_rows: pooled rows whose last token is in the step.
        constraint_rows: rows whose constraints forks take over in the step.
        num_drafted: drafted tokens that the step may compute after the newest token of each row that decodes; None
            if there are none.
    """

    step_id: int
    now: float
    num_tokens_left: int
    full_partitions: set[int] = field(default_factory=set)
    grown_rows: IntArray | RowArray = field(default_factory=lambda: NO_ROWS)
    grown_ids: IntArray = field(default_factory=lambda: NO_INTS)
    new: list[NewSequence] = field(default_factory=list)
    appended_rows: list[int] = field(default_factory=list)
    appended_ids: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_lens: list[int] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    pooled_rows: list[int] = field(default_factory=list)
    constraint_rows: list[int] = field(default_factory=list)
    num_drafted: IntArray | None = None

    def rows(self, num_rows: int) -> set[int]:
        """Return the rows that this plan needs; table t is of row ``t % num_rows``."""
        tables = (*self.grown_rows.tolist(), *self.appended_rows)
        return {*(table % num_rows for table in tables), *self.chunk_rows, *self.constraint_rows}
