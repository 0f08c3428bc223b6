"""Sequence: one continuation of a request, from its submission to its end."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ...proto.digests import parent_with_media
from ...proto.kv_transfer import KvOffer
from ...proto.lora import LoraReference
from ...proto.media import MediaItem
from ...proto.pooling import PoolingParams
from ...proto.sampling import SamplingDefaults, SamplingParams
from ...proto.step import PromptScoring, RowLogitsProcessors, RowSampling
from ...proto.stream import Finish, FinishReason, Timings
from ...proto.structured_outputs import OutputConstraint
from .beam_group import BeamGroup
from .repetition import RepetitionDetector


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's state of a sequence, except the arrays of its row.

    While it runs, its newest tokens are in its row's tail (`RowState`); `token_ids` has the full blocks before them.

    Attributes:
        seq_id: unique in the replica.
        arrival: order of arrival: the seq_id of its request's first sequence.
        gateway: gateway that submitted it and receives its tokens.
        seed: seed of the request plus the index of this output.
        max_len: number of tokens, prompt included, at which it ends by length.
        token_ids: prompt and generated tokens, as far as they were moved out of the row.
        root: start of the chain of its block digests.
        has_common_root: requests without tenant, salt and adapter have the same root.
        prefix_pool: its tenant shares prefixes with the other tenants of this pool; empty if with none.
        num_cached_tokens: as reported to its tenant, see `OwnPrefixes`.
        block_digests: prefix-cache digest of each full block of token_ids.
        rank: by priority; a smaller one goes first.
        deadline: on the scheduler's clock.
        row: its row (batch slot) while it runs.
        has_run: it had a row, or was forked from a sequence that had.
        parent: sequence from which it is forked once the prompt that they share is computed; None once it starts.
        children: sequences attached to it as their parent: further outputs for the same prompt.
        beams: beam search that it is part of.
        is_suspended: it is a preempted beam without a token to compute until its search continues.
        host_blocks: host blocks that hold the KV of its first `num_host_tokens` tokens after a preemption by swap.
        host_state: slot in host memory with its state after these tokens; 0 for none.
        num_lost_tokens: computed tokens that the last preemption or recovery discarded.
        interrupted_at: when the worker group failed under it; None once it runs again.
        num_recoveries, recovered_s: failures of the worker group that it survived, and the time that they took.
        awaited_partition: of the KV pool, in which it waits for blocks; None if it has not been passed since it ran.
        times_overtaken: number of later arrivals admitted before it, under the longest-prefix policy.
        scores_prompt: it reports the log-probabilities of its prompt, for itself and its children.
        num_scored_tokens: prompt tokens with known log-probabilities; the first prompt token has none.
        constraint: of its output; None if it may have any form.
        repetition: detector of repetitions in its output; None if it may repeat itself.
        lora: its adapter; None for the model alone.
        pooling: it ends with its prompt, whose hidden states are pooled; None if it generates tokens.
        weights_version: of the weights that it is computed with.
        snapshot_ends: numbers of its known tokens after which its state is saved; empty for models without states.
        num_snapshot_tokens: tokens of its newest snapshot, its own or the one from which it started.
        kv: its blocks at the replica that it left, until they are pulled or given up; None without any.
        media: the images of its prompt, in order.
        media_ids: of the encoder's output of each of them, by `MediaQueue`.
        prefill_only: it leaves with its first token, for another replica to continue it.
        num_lent_tokens: first tokens of its prompt whose blocks were lent while the rest is computed.
        transfer_s: time that it has waited for blocks of another replica.
        pools_all_tokens: it needs the hidden states of all its tokens, so that no KV of a cache is of use to it.
    """

    seq_id: int
    arrival: int
    gateway: bytes
    handle: int
    request_id: str
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    max_len: int
    token_ids: array[int]
    eos_token_ids: tuple[int, ...]
    arrived_at: float
    root: bytes = b""
    has_common_root: bool = False
    tenant: str = ""
    prefix_pool: str = ""
    rank: int = 0
    deadline: float | None = None
    block_digests: list[bytes] = field(default_factory=list)
    row: int | None = None
    has_run: bool = False
    parent: Sequence | None = None
    children: list[Sequence] = field(default_factory=list)
    beams: BeamGroup | None = None
    is_suspended: bool = False
    host_blocks: list[int] = field(default_factory=list)
    num_host_tokens: int = 0
    host_state: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_lost_tokens: int = 0
    awaited_partition: int | None = None
    times_overtaken: int = 0
    scores_prompt: bool = False
    num_scored_tokens: int = 0
    constraint: OutputConstraint | None = None
    repetition: RepetitionDetector | None = None
    pooling: PoolingParams | None = None
    pools_all_tokens: bool = False
    weights_version: str = ""
    first_run_at: float | None = None
    first_token_at: float | None = None
    preempted_at: float | None = None
    preempted_s: float = 0.0
    interrupted_at: float | None = None
    num_recoveries: int = 0
    recovered_s: float = 0.0
    lora: LoraReference | None = None
    snapshot_ends: tuple[int, ...] = ()
    num_snapshot_tokens: int = 0
    kv: KvOffer | None = None
    prefill_only: bool = False
    num_lent_tokens: int = 0
    transfer_s: float = 0.0
    media: tuple[MediaItem, ...] = ()
    media_ids: tuple[int, ...] = ()

    @property
    def is_scoring(self) -> bool:
        """Return whether log-probabilities of its prompt are still missing."""
        return self.scores_prompt and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def num_reusable_tokens(self) -> int:
        """Return the number of first tokens whose KV may come from a cache: no logits of them are needed."""
        if self.pools_all_tokens:
            return 0
        return self.num_scored_tokens if self.is_scoring else len(self.token_ids) - 1

    @property
    def ends_at_max_len(self) -> bool:
        """Return whether nothing but its limit ends it."""
        return not (self.eos_token_ids or self.sampling.stop_token_ids or self.sampling.stop)

    @property
    def may_draft(self) -> bool:
        """Return whether it can have drafted tokens. A beam's tokens are chosen later."""
        return self.beams is None

    @property
    def has_grammar(self) -> bool:
        return self.constraint is not None and bool(self.constraint.grammar)

    def row_sampling(self) -> RowSampling:
        """Return the parameters with which a rank samples for this sequence."""
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
            constraint=self.constraint,
            reports_allowed=self.beams is not None and self.constraint is not None,
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
            extra_args=params.extra_arg_pairs,
        )
        return None if logits_processors == RowLogitsProcessors(num_prompt_tokens) else logits_processors

    def parent_of_block(self, index: int, block_size: int) -> bytes:
        """Return the digest that its block number `index` continues; the digests of all blocks before are known."""
        parent = self.block_digests[index - 1] if index else self.root
        return parent_with_media(parent, self.media, index, block_size) if self.media else parent

    def tokens_to_second_snapshot(self, num_scheduled: int) -> int | None:
        """Return the tokens from `num_scheduled` to the second end where its state is saved; None without two."""
        ahead = [end - num_scheduled for end in self.snapshot_ends if end > num_scheduled]
        return ahead[1] if len(ahead) > 1 else None

    def change_root(self, root: bytes, weights_version: str) -> None:
        """Go on with other weights: cached blocks of the earlier ones do not count."""
        self.root, self.weights_version = root, weights_version
        self.block_digests = []

    def on_start(self, num_cached_tokens: int, now: float) -> None:
        """Record that it got a row, for the first time or again, with the KV of its first tokens."""
        if self.first_run_at is None:
            self.first_run_at = now
        if self.preempted_at is not None:
            self.preempted_s += now - self.preempted_at
            self.preempted_at = None
        if self.interrupted_at is not None:
            self.recovered_s += now - self.interrupted_at
            self.num_recoveries += 1
            self.interrupted_at = None
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
        kv: KvOffer | None = None,
    ) -> Finish:
        """Return its Finish.

        Args:
            num_tokens: prompt and sampled tokens.
            handle: handle of the output, if it is not the sequence's own.
            kv: its blocks, for the replica that continues it.
        """
        return Finish(
            handle=self.handle if handle is None else handle,
            reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=num_tokens - self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            timings=self._timings(now),
            score=score,
            weights_version=self.weights_version,
            kv=kv,
        )

    def _timings(self, now: float) -> Timings:
        first_run_at = now if self.first_run_at is None else self.first_run_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        # Time spent preempted or in recovery is reported separately and is part of the phase that it interrupted too.
        return Timings(
            queued_s=first_run_at - self.arrived_at,
            prefill_s=first_token_at - first_run_at,
            decode_s=now - first_token_at,
            preempted_s=self.preempted_s,
            recomputed_tokens=self.num_recomputed_tokens,
            num_recoveries=self.num_recoveries,
            recovered_s=self.recovered_s,
            transfer_s=self.transfer_s,
        )
