"""Sequence: one continuation of a request, from its submission to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ...proto.sampling import SamplingDefaults, SamplingParams
from ...proto.step import PromptScoring, RowLogitsProcessors, RowSampling
from ...proto.stream import Finish, FinishReason, Timings
from .beam_group import BeamGroup


@dataclass(slots=True, eq=False)
class Sequence:
    """What the scheduler knows of a sequence beside its row.

    While it runs, its newest tokens are in its row's tail (`RowState`); `token_ids` has the full blocks before it.

    Attributes:
        seq_id: unique in the replica.
        arrival: the seq_id of its request's first sequence: the order of arrival.
        gateway: who submitted it, and is told of it.
        seed: the request's, plus the number of this answer.
        limit: prompt plus answer at which it ends by length.
        token_ids: prompt and generated tokens, as far as they were moved out of the row.
        root: where the chain of its block digests begins.
        block_digests: the prefix-cache digest of each full block of token_ids.
        deadline: on the scheduler's clock.
        row: its row while it runs.
        has_run: it had a row, or was forked from a sequence that had.
        leader: whose prompt it will share, until it starts.
        siblings: those whose leader it is: further answers to the same prompt.
        beams: the beam search that it is part of.
        is_parked: a preempted beam that has no token to compute until its search goes on.
        host_blocks: where a preemption by swap put its KV, and of how many tokens that is.
        num_lost_tokens: computed tokens that the last preemption gave up.
        times_overtaken: by later arrivals, under the longest-prefix policy.
        scores_prompt: it reports the log-probabilities of its prompt, for itself and its siblings.
        num_scored_tokens: tokens of the prompt whose log-probabilities are known; the first has none.
    """

    seq_id: int
    arrival: int
    gateway: bytes
    handle: int
    request_id: str
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    limit: int
    token_ids: array[int]
    eos_token_ids: tuple[int, ...]
    arrived_at: float
    root: bytes = b""
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    block_digests: list[bytes] = field(default_factory=list)
    row: int | None = None
    has_run: bool = False
    leader: Sequence | None = None
    siblings: list[Sequence] = field(default_factory=list)
    beams: BeamGroup | None = None
    is_parked: bool = False
    host_blocks: list[int] = field(default_factory=list)
    num_host_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_lost_tokens: int = 0
    times_overtaken: int = 0
    scores_prompt: bool = False
    num_scored_tokens: int = 0
    first_run_at: float | None = None
    first_token_at: float | None = None
    preempted_at: float | None = None
    preempted_s: float = 0.0

    @property
    def is_scoring(self) -> bool:
        """Log-probabilities of its prompt are still to be told."""
        return self.scores_prompt and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens whose logits nobody needs, so that their KV may come from a cache: always short of the last."""
        return self.num_scored_tokens if self.is_scoring else len(self.token_ids) - 1

    def row_sampling(self) -> RowSampling:
        """What a rank needs to sample for this sequence."""
        params, settings = self.sampling, SamplingDefaults().under(self.sampling)
        scoring = None
        if self.is_scoring:
            num_top = params.prompt_logprobs or 0
            scoring = PromptScoring(num_top, self.num_scored_tokens + 1, self.num_prompt_tokens)
        return RowSampling(
            temperature=0.0 if self.beams is not None else settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=self.seed,
            logprobs=params.logprobs if self.beams is None else self.beams.num_candidates,
            logits_processors=self._logits_processors(settings.repetition_penalty),
            scoring=scoring,
        )

    def _logits_processors(self, repetition_penalty: float) -> RowLogitsProcessors | None:
        params, num_prompt_tokens = self.sampling, self.num_prompt_tokens
        guarded = params.min_tokens > 0
        logits_processors = RowLogitsProcessors(
            num_prompt_tokens=num_prompt_tokens,
            repetition_penalty=repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=params.bias_pairs,
            bad_words=tuple(word for word in params.bad_words if not isinstance(word, str)),
            allowed_token_ids=params.allowed_token_ids,
            min_len=num_prompt_tokens + params.min_tokens if guarded else 0,
            stop_token_ids=self.eos_token_ids + params.stop_token_ids if guarded else (),
        )
        return None if logits_processors == RowLogitsProcessors(num_prompt_tokens) else logits_processors

    def entered(self, num_cached_tokens: int, now: float) -> None:
        """It got a row, for the first time or again, with the KV of its first tokens at hand."""
        if self.first_run_at is None:
            self.first_run_at = now
            self.num_cached_tokens = num_cached_tokens
        if self.preempted_at is not None:
            self.preempted_s += now - self.preempted_at
            self.preempted_at = None
        self.num_recomputed_tokens += max(0, self.num_lost_tokens - num_cached_tokens)
        self.num_lost_tokens = 0
        self.has_run = True

    def finish(
        self,
        reason: FinishReason,
        num_tokens: int,
        now: float,
        stop_token_id: int | None = None,
        score: float | None = None,
        handle: int | None = None,
    ) -> Finish:
        """Its account. `num_tokens`: prompt and all that was sampled. `handle`: the answer's, where not its own."""
        return Finish(
            handle=self.handle if handle is None else handle,
            reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=num_tokens - self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            timings=self._timings(now),
            score=score,
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
