"""Sequence: one continuation of a request, from its submission to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..proto.sampling import SamplingParams
from ..proto.step import RowSampling
from ..proto.stream import Finish, FinishReason, Submit, Timings


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler knows of a sequence beside its row.

    While it runs, its newest tokens are in its row's tail (`Rows`); `token_ids` has the full blocks before it.

    Attributes:
        seq_id: unique in the replica, and the order of arrival.
        gateway: who submitted it, and is told of it.
        limit: prompt plus answer at which it ends by length.
        token_ids: prompt and generated tokens, as far as they were moved out of the row.
        block_digests: the prefix-cache digest of each full block of token_ids.
        row: its row while it runs.
        num_lost_tokens: computed tokens whose blocks the last preemption took.
    """

    seq_id: int
    gateway: bytes
    handle: int
    request_id: str
    sampling: SamplingParams
    num_prompt_tokens: int
    limit: int
    token_ids: array[int]
    eos_token_ids: tuple[int, ...]
    arrived_at: float
    block_digests: list[bytes] = field(default_factory=list)
    row: int | None = None
    aborted: bool = False
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_lost_tokens: int = 0
    first_run_at: float | None = None
    first_token_at: float | None = None
    preempted_at: float | None = None
    preempted_s: float = 0.0

    @staticmethod
    def of(
        submit: Submit, seq_id: int, gateway: bytes, limit: int, eos_token_ids: tuple[int, ...], now: float
    ) -> Sequence:
        return Sequence(
            seq_id=seq_id,
            gateway=gateway,
            handle=submit.handle,
            request_id=submit.request_id,
            sampling=submit.sampling,
            num_prompt_tokens=len(submit.prompt_token_ids),
            limit=limit,
            token_ids=array("i", submit.prompt_token_ids.astype("i4").tobytes()),
            eos_token_ids=() if submit.sampling.ignore_eos else eos_token_ids,
            arrived_at=now,
        )

    def row_sampling(self) -> RowSampling:
        """What a rank needs to sample for this sequence."""
        params = self.sampling
        guarded = params.min_tokens > 0
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            logprobs=params.logprobs,
            stop_free_len=self.num_prompt_tokens + params.min_tokens if guarded else 0,
            stop_token_ids=self.eos_token_ids + params.stop_token_ids if guarded else (),
        )

    def started(self, now: float) -> None:
        """It got a row, for the first time or again."""
        if self.first_run_at is None:
            self.first_run_at = now
        if self.preempted_at is not None:
            self.preempted_s += now - self.preempted_at
            self.preempted_at = None

    def finish(
        self, reason: FinishReason, num_tokens: int, now: float, stop_token_id: int | None = None
    ) -> Finish:
        """Its account. `num_tokens`: prompt and all that was sampled."""
        return Finish(
            handle=self.handle,
            reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=num_tokens - self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            timings=self._timings(now),
        )

    def _timings(self, now: float) -> Timings:
        first_run_at = now if self.first_run_at is None else self.first_run_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        # Time spent preempted is told apart, whichever of the two phases it interrupted.
        return Timings(
            queued_s=first_run_at - self.arrived_at,
            prefill_s=first_token_at - first_run_at,
            decode_s=now - first_token_at,
            preempted_s=self.preempted_s,
            recomputed_tokens=self.num_recomputed_tokens,
        )
