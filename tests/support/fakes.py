"""Fakes for tests of the control plane: a worker group without a model, small configurations, oracles."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from fake_kv_peer import FakeKvPeer

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.resolve import engine_config
from quire.proto.block_tables import BlockTables, add_digests, outputs_digest
from quire.proto.config import EngineConfig, ModelConfig, PoolingConfig, SpeculativeConfig, SwapRates
from quire.proto.engine_command import EngineCommand
from quire.proto.errors import QuireError, RankFailed
from quire.proto.kv_transfer import KvReport
from quire.proto.lora import LoraReport
from quire.proto.media import MEDIA_DIGEST_BYTES, MediaItem, MediaTensors
from quire.proto.pooling import Pooled, PoolingParams
from quire.proto.replica_status import RankStatus
from quire.proto.sampling import SamplingParams
from quire.proto.step import (
    WHOLE_IMAGE,
    EncoderInput,
    Logprobs,
    NewSequence,
    PromptLogprobs,
    PromptScoring,
    StepPlan,
    StepResult,
)
from quire.proto.stored_kv import StoredOrder, StoredReport, is_state, split_keys
from quire.proto.stream import Submit
from quire.proto.structured_outputs import OutputConstraint
from quire.proto.vision import AttendsWithin, VisionSpec
from quire.scheduler.kv.kv_tiers import KvTiers
from quire.scheduler.sequences.beam_search import BeamSearch
from quire.scheduler.service.worker_group import Rebuilt

VOCAB_SIZE = 64
EOS = 1
IMAGE_TOKEN = VOCAB_SIZE - 1


def small_config(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    num_host_blocks: int = 0,
    swap_blocks_per_s: float = 0.0,
    eos: tuple[int, ...] = (EOS,),
    num_speculative_tokens: int = 0,
    pooling_type: str | None = None,
    layer_windows: tuple[int, ...] = (0,),
    num_kv_partitions: int = 1,
    num_state_slots: int | None = None,
    num_host_state_slots: int = 0,
    encoder_cache_rows: int | None = None,
    attends_within: AttendsWithin = "none",
    sees_whole_prompt: bool = False,
    image_work: int = 0,
    num_stages: int = 1,
    **scheduler: Any,
) -> EngineConfig:
    """Return a configuration for tests of the control plane; its model does not exist.

    Args:
        num_speculative_tokens: 0 for no speculative decoding.
        pooling_type: of a model that pools prompts beside generating; None for one that generates only.
        layer_windows: of each layer, 0 for none.
        num_state_slots: of a model that keeps states; None for one that keeps none.
        encoder_cache_rows: of a model that reads images, the image tokens that the encoder cache holds; None for one
            that reads none.
        attends_within: as in VisionSpec.
        sees_whole_prompt: as in ModelConfig.
        image_work: multiplications of the encoder for an image; a step has `EngineConfig.encoder_step_work`.
        num_kv_partitions: more than 1 for data-parallel attention, of as many ranks.
        num_stages: pipeline stages, with as many steps in flight and one more.
    """
    model = ModelConfig(
        path="", name="fake", architecture="Fake", hf={}, dtype="float32", max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE, num_layers=len(layer_windows), num_heads=1, num_kv_heads=1, head_dim=1,
        eos_token_ids=eos, layer_windows=layer_windows,
        pooling=None if pooling_type is None else PoolingConfig(pooling_type, 2),
        has_states=num_state_slots is not None, sees_whole_prompt=sees_whole_prompt,
        vision=None
        if encoder_cache_rows is None
        else VisionSpec(
            "fake", IMAGE_TOKEN, embedding_size=1, attends_within=attends_within, num_parameters=image_work,
            patch_bytes=MEDIA_DIGEST_BYTES,
        ),
    )  # fmt: skip
    defaults: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_queue_len": 1000}
    options = EngineOptions(
        "fake", block_size=block_size, num_kv_blocks=num_blocks, prefix_caching=prefix_caching,
        num_host_kv_blocks=num_host_blocks, num_state_slots=num_state_slots,
        num_host_state_slots=num_host_state_slots,
        encoder_cache_memory=4 * encoder_cache_rows if encoder_cache_rows else None, **(defaults | scheduler),
    )  # fmt: skip
    config = engine_config(options, model).with_swap_rates([SwapRates(swap_blocks_per_s, swap_blocks_per_s)])
    if num_stages > 1:
        parallel = replace(config.parallel, pipeline_parallel_size=num_stages, stage_sizes=(1,) * num_stages)
        limits = replace(config.scheduler, max_steps_in_flight=num_stages + 1)
        config = replace(config, parallel=parallel, scheduler=limits)
    if num_kv_partitions > 1:
        parallel = replace(config.parallel, tensor_parallel_size=num_kv_partitions, enable_dp_attention=True)
        config = replace(config, parallel=parallel)
    if num_speculative_tokens:
        config = replace(config, speculative=SpeculativeConfig("draft_model", num_speculative_tokens))
    return config


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Return token ids without the special ones, the same for the same length and seed."""
    token_ids: list[int] = np.random.default_rng(seed).integers(EOS + 1, VOCAB_SIZE, length).tolist()
    return token_ids


def submit(handle: int, prompt: list[int], **settings: Any) -> Submit:
    """Return a request; `settings` are fields of SamplingParams and Submit."""
    options: dict[str, Any] = {
        name: settings.pop(name)
        for name in (
            "tenant",
            "priority",
            "timeout_s",
            "salt",
            "prefix_pool",
            "pooling",
            "lora",
            "constraint",
            "kv",
            "media",
            "prefill_only",
            "fetch_only",
            "lend_only",
        )
        if name in settings
    }
    options["generated_token_ids"] = np.array(settings.pop("generated", []), np.int32)
    params = SamplingParams(**({"temperature": 0.0} | settings))
    return Submit(handle, f"request-{handle}", np.array(prompt, np.int32), params, **options)


def constraint_for(prompt: list[int]) -> OutputConstraint:
    """Return a constraint, which the fake model ignores, that shows of which prompt's outputs it is."""
    return OutputConstraint(len(prompt), np.array(prompt, np.int32).tobytes())


def chain(state: bytes, token_id: int) -> bytes:
    """Return the fake KV of a token: a digest of the sequence up to it, which detects KV of another prefix."""
    return hashlib.blake2b(state + token_id.to_bytes(4, "little"), digest_size=8).digest()


def next_token(state: bytes) -> int:
    """Return the fake model's next token, which depends on the whole history."""
    return int.from_bytes(state[:4], "little") % VOCAB_SIZE


def logprobs_of(state: bytes) -> np.ndarray:
    """Return the fake model's log-probabilities, [VOCAB_SIZE] float32."""
    logits = np.random.default_rng(int.from_bytes(state, "little")).normal(size=VOCAB_SIZE)
    logprobs: np.ndarray = logits - np.log(np.exp(logits).sum())
    return logprobs.astype(np.float32)


def pooling_oracle(prompt: list[int]) -> list[float]:
    """Return the fake model's vector of a prompt: its next token, and the number of its tokens."""
    state = b""
    for token_id in prompt:
        state = chain(state, token_id)
    return [next_token(state), len(prompt)]


def images_of(rows: list[bytes]) -> dict[bytes, MediaTensors]:
    """Return digest |-> tensors of images, which the fake encoder turns into their digest."""
    return {digest: {"digest": np.frombuffer(digest, np.uint8)} for digest in rows}


def see(prompt: list[int], media: Sequence[MediaItem]) -> list[int]:
    """Return what the fake model reads: a number of its own for each token of an image in place of the token."""
    seen = list(prompt)
    for item in media:
        for place in range(item.start, item.end):
            number = hashlib.blake2b(item.digest + bytes([place - item.start]), digest_size=3).digest()
            seen[place] = VOCAB_SIZE + int.from_bytes(number, "little")
    return seen


def score_oracle(prompt: list[int], media: Sequence[MediaItem] = ()) -> list[tuple[int, float]]:
    """Return (position, log-probability) of the prompt's tokens by the fake model, from the second on."""
    state, scores, seen = b"", [], see(prompt, media)
    for place in range(1, len(prompt)):
        state = chain(state, seen[place - 1])
        scores.append((place, float(logprobs_of(state)[prompt[place]])))
    return scores


def oracle(prompt: list[int], max_tokens: int, stops: tuple[int, ...] = (EOS,)) -> list[int]:
    """Return the fake model's output for one sequence alone."""
    state, output = b"", list[int]()
    for token_id in prompt:
        state = chain(state, token_id)
    while len(output) < max_tokens:
        output.append(next_token(state))
        if output[-1] in stops:
            break
        state = chain(state, output[-1])
    return output


def beam_oracle(
    prompt: list[int], max_tokens: int, width: int, n: int, stops: tuple[int, ...]
) -> list[list[int]]:
    """Return the outputs of one beam search over the fake model, without rows or blocks."""
    search = BeamSearch(width, max_tokens, 0, stops, length_penalty=1.0, early_stopping=False)
    start = b""
    for token_id in prompt:
        start = chain(start, token_id)
    states = [start]
    while True:
        candidates = []
        for state in states:
            logprobs = logprobs_of(state)
            order = np.argsort(-logprobs, kind="stable")[: search.num_candidates].astype(np.int32)
            candidates.append((order, logprobs[order]))
        children = search.advance(candidates)
        if not children:
            return [list(hypothesis.token_ids) for hypothesis in search.hypotheses[:n]]
        states = [chain(states[child.parent], child.token_id) for child in children]


def _apply_to_tables(tables: BlockTables, plan: StepPlan) -> None:
    tables.release(plan.released_rows)
    for new in plan.new:
        tables.put(new.row, new.block_ids)
        if new.state_slot:
            tables.put_state(new.row, new.state_slot)
    tables.trim(plan.trimmed_rows, plan.trimmed_lens)
    tables.append(plan.appended_rows, plan.appended_ids)


def _pooled(vectors: dict[int, list[float]]) -> Pooled:
    rows = np.array(list(vectors), np.int32)
    return Pooled(rows, np.full_like(rows, 2), np.array(list(vectors.values()), np.float32).ravel())


class FakeFiles:
    """The files of the fake ranks, which outlive a worker group. They carry out orders when `end_orders` is called.

    Attributes:
        blocks: key |-> content of a block, or of a state.
        faults: `fail` for reads that find nothing, `torn` for blocks that are not genuine, `late` for orders that
            end with a later call.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, Any] = {}
        self.faults: set[str] = set()
        self._orders: list[StoredOrder] = []
        self._has_told = False

    def reset(self) -> None:
        """Start anew, as ranks do: no order is carried out any more."""
        self._orders, self._has_told = [], False

    def begin(self, orders: tuple[StoredOrder, ...]) -> None:
        self._orders += orders

    def end_orders(
        self, host_kv: list[list[tuple[int, bytes]]], host_states: list[bytes]
    ) -> tuple[StoredReport, ...]:
        """Carry out what waits, and report it."""
        reports = [] if self._has_told else [StoredReport(0, added=b"".join(self.blocks), is_whole=True)]
        self._has_told = True
        if "late" not in self.faults:
            reports += [self._end(order, host_kv, host_states) for order in self._orders]
            self._orders = []
        return tuple(reports)

    def _end(
        self, order: StoredOrder, host_kv: list[list[tuple[int, bytes]]], host_states: list[bytes]
    ) -> StoredReport:
        keys, failed, added = split_keys(order.keys), [], []
        is_torn = order.is_read and "torn" in self.faults
        for position, (key, place) in enumerate(zip(keys, order.host_blocks.tolist(), strict=True)):
            memory: list[Any] = host_states if is_state(key) else host_kv
            if order.is_read and ("fail" in self.faults or is_torn or key not in self.blocks):
                failed.append(position)
                if is_torn:
                    memory[place] = b"torn" if is_state(key) else [(-1, b"torn")] * len(host_kv[place])
                self.blocks.pop(key, None)
            elif order.is_read:
                memory[place] = copy(self.blocks[key])
            else:
                added.append(key)
                self.blocks[key] = copy(memory[place])
        return StoredReport(
            0,
            order_id=order.order_id,
            failed=np.array(failed, np.int32),
            num_corrupt=len(failed) * is_torn,
            seconds=0.001,
            added=b"".join(added),
            removed=b"".join(keys[position] for position in failed),
        )


class FakeWorkerGroup:
    """A worker group whose KV cache holds digests. It executes plans as a rank does and checks every read.

    A block holds the digests of one cache group. Of a group with a window only the tokens in it are read. A state
    slot holds the digest of the sequence whose state it has.

    `broadcast` only queues a plan, which is executed when its result is gathered, as late as possible. `broadcast`
    checks the fences: no plan may allocate a block that a plan in flight reads or writes. Of the drafted tokens, the
    share `draft_accuracy` is what the model samples; a row often has fewer than allowed.

    Attributes:
        failure: raised by every step until it is None again.
        rebuilt: the epochs of all calls of `rebuild`.
        kept, has_new_ranks: of `rebuild`.
        rebuild_error: raised by `rebuild`.
        poison: every step with a sequence that has this token fails.
        commands: those that were carried out or refused.
        command_error: refuses commands.
    """

    draft_accuracy = 0.7

    def __init__(self, config: EngineConfig, files: FakeFiles | None = None) -> None:
        self._config = config
        self.files = files or FakeFiles()
        self.files.reset()
        self.groups = config.cache_layout.groups
        self.failure: RankFailed | None = None
        self.closed = False
        self.num_executed_tokens = 0
        self.rebuilt: list[int] = []
        self.kept, self.has_new_ranks = KvTiers.NONE, True
        self.rebuild_error: QuireError | None = None
        self.poison: int | None = None
        self.poison_is_step_error = True
        self.commands: list[EngineCommand] = []
        self.command_error = ""
        self.kv_peer: FakeKvPeer | None = None  # of ranks whose blocks travel
        self.rng = np.random.default_rng(0)
        self._reset()

    def _reset(self) -> None:
        self._forget(KvTiers.NONE)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self.plans: deque[bytes] = deque()
        # media_id |-> its tensors, for each plan to come that encodes it; one between them may drop it
        self.images: dict[int, list[EncoderInput]] = {}
        self.touched: deque[set[int]] = deque()  # blocks, by each plan in flight
        self.touched_slots: deque[set[int]] = deque()
        rows = self._config.scheduler.max_num_seqs
        self.planned_tables = self._make_tables()  # after the plans in flight
        # Of each row: tokens known at its start, and computed after the plans in flight if no draft is accepted.
        self.planned_prompt, self.planned_computed = [0] * rows, [0] * rows

    def _make_tables(self) -> BlockTables:
        config = self._config
        return BlockTables(config.scheduler.max_num_seqs, config.max_blocks_per_seq, len(self.groups))

    def _forget(self, kept: KvTiers) -> None:
        """Empty the rows, and the KV except in the memories that are kept."""
        config = self._config
        assert config.cache.num_kv_blocks is not None
        rows, block_size = config.scheduler.max_num_seqs, config.cache.block_size
        self.block_size = block_size
        self.tables = self._make_tables()
        empty = [(-1, b"")] * block_size
        partitions, num_host_blocks = config.parallel.num_kv_partitions, config.cache.num_host_kv_blocks + 1
        if KvTiers.DEVICE not in kept:
            num_blocks = partitions * config.cache.num_kv_blocks
            self.kv: list[list[tuple[int, bytes]]] = [list(empty) for _ in range(num_blocks)]
            self.states = [b"nothing"] * (config.cache.num_state_slots or 0)
        if KvTiers.HOST not in kept:
            self.host_states = [b"nothing"] * (config.cache.num_host_state_slots + 1)
            self.host_kv: list[list[tuple[int, bytes]]] = [[] for _ in range(partitions * num_host_blocks)]
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.num_computed = [0] * rows
        self.decoding = [False] * rows
        self.num_logprobs: list[int | None] = [None] * rows
        self.scoring: list[PromptScoring | None] = [None] * rows
        self.pooling: list[PoolingParams | None] = [None] * rows
        self.constraints: list[OutputConstraint | None] = [None] * rows
        self.num_hidden = [0] * rows  # tokens whose hidden states were computed in the row
        # Of each row: what the model reads of its known prompt, and place |-> the media_id of the image there.
        self.seen: list[list[int]] = [[] for _ in range(rows)]
        self.images_at: list[dict[int, tuple[int, bytes]]] = [{} for _ in range(rows)]
        self.outputs: dict[int, bytes] = {}  # media_id |-> digest of the encoded image
        self.in_part: dict[int, tuple[bytes, int]] = {}  # media_id |-> digest, and the share that is done

    def broadcast(self, plan: StepPlan) -> None:
        if plan.command is not None:
            assert not self.plans, "a command comes beside a step in flight"
            self.planned_tables = self._make_tables()
        self._check_fences(plan)
        self.plans.append(plan.encode())

    def send_media(self, image: EncoderInput) -> None:
        self.images.setdefault(image.media_id, []).append(EncoderInput.decode(image.encode()))

    def _encode(self, plan: StepPlan) -> None:
        for media_id in plan.media_drops.tolist():
            if self.in_part.pop(media_id, None) is None:
                del self.outputs[media_id]
        for media_id, share in zip(plan.encodes.tolist(), plan.encode_shares.tolist(), strict=True):
            assert media_id not in self.outputs, f"image {media_id} is encoded twice"
            if media_id not in self.in_part:
                self.in_part[media_id] = bytes(self.images[media_id].pop(0).data), 0
            data, done = self.in_part.pop(media_id)
            assert share >= done, f"image {media_id} loses a part of what is done"
            if share == WHOLE_IMAGE:
                self.outputs[media_id] = data
            else:
                self.in_part[media_id] = data, share

    def _input(self, row: int, place: int) -> int:
        """Return what the model reads at a place of a row."""
        return self.seen[row][place] if place < len(self.seen[row]) else self.tokens[row][place]

    def _check_fences(self, plan: StepPlan) -> None:
        fresh = {*plan.appended_ids.tolist(), *plan.copies[:, 1].tolist(), *plan.swap_in[:, 1].tolist()}
        for new in plan.new:
            tables = new.block_ids.reshape(len(self.groups), -1)
            fresh |= set(tables[:, new.num_computed_tokens // self.block_size :].ravel().tolist())
        for touched in self.touched:
            assert not fresh & touched, (
                f"step {plan.step_id} takes blocks {fresh & touched} of a step in flight"
            )
        copies, saves, filled = plan.state_copies, plan.state_saves, plan.state_swap_in[:, 1].tolist()
        fresh_slots = {*copies[:, 1].tolist(), *filled, *saves[:, 1].tolist()}
        fresh_slots |= {new.state_slot for new in plan.new}
        for touched in self.touched_slots:
            taken = (fresh_slots - {0}) & touched
            assert not taken, f"step {plan.step_id} takes state slots {taken} of a step in flight"
        _apply_to_tables(self.planned_tables, plan)
        used = self.planned_tables.state_slots.tolist()
        self.touched_slots.append({*used, *copies.ravel().tolist(), *filled, *saves.ravel().tolist()} - {0})
        for row in plan.released_rows.tolist():
            self.planned_prompt[row] = self.planned_computed[row] = 0
        for new in plan.new:
            self.planned_prompt[new.row] = new.num_tokens
            self.planned_computed[new.row] = new.num_computed_tokens
        rows = self.planned_tables.lens[: self.planned_tables.num_rows].nonzero()[0].tolist()
        self.touched.append({block for row in rows for block in self._attended(row)})
        self.touched[-1] |= {*plan.copies.ravel().tolist(), *plan.swap_out[:, 0].tolist()}
        decoding = {
            row
            for row in rows
            if self.planned_computed[row] >= self.planned_prompt[row] and row not in plan.held_rows
        }
        for row, count in (
            *dict.fromkeys(decoding, 1).items(),
            *zip(plan.chunk_rows, plan.chunk_lens, strict=True),
        ):
            self.planned_computed[row] += int(count)

    def _attended(self, row: int) -> set[int]:
        """Return the blocks that the next plan's tokens of a row attend to."""
        tables, blocks = self.planned_tables, set[int]()
        for group, kind in enumerate(self.groups):
            first = kind.first_block(self.planned_computed[row], self.block_size)
            blocks |= set(tables.row(group * tables.num_rows + row)[first:].tolist())
        return blocks

    def gather(self, timeout_s: float) -> StepResult:
        self.check()
        if self.poison is not None:
            self._fail_if_poisoned(StepPlan.decode(self.plans[0]))
        self.touched.popleft()
        self.touched_slots.popleft()
        return self.execute(StepPlan.decode(self.plans.popleft()))

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def examine(self, waited_s: float, *, failed_s: float) -> None: ...

    def rebuild(self, epoch: int) -> Rebuilt:
        """Start anew with empty rows, unless `rebuild_error` says that it cannot.

        In the memories that are kept, everything is lost that the plans in flight would have written.
        """
        self.rebuilt.append(epoch)
        if self.rebuild_error is not None:
            raise self.rebuild_error
        self._lose_writes()
        if self.kv_peer is not None:
            self.kv_peer.restart()
        self.files.reset()
        self._forget(self.kept)
        self._forget_plans()
        return Rebuilt(self.has_new_ranks, self.kept)

    def _lose_writes(self) -> None:
        kv, host_kv = [list(block) for block in self.kv], [list(block) for block in self.host_kv]
        states, host_states = list(self.states), list(self.host_states)
        while self.plans:
            self.execute(StepPlan.decode(self.plans.popleft()))
        self.states, self.host_states = (
            [now if was == now else b"lost" for was, now in zip(before, after, strict=True)]
            for before, after in ((states, self.states), (host_states, self.host_states))
        )
        for before, after in ((kv, self.kv), (host_kv, self.host_kv)):
            for block_id, block in enumerate(after):
                old = before[block_id] if len(before[block_id]) == len(block) else [None] * len(block)
                pairs = zip(old, block, strict=True)
                after[block_id] = [(-1, b"lost") if was != now else now for was, now in pairs]

    def _fail_if_poisoned(self, plan: StepPlan) -> None:
        """Fail the step if the poisoned token is among the tokens of a row in it."""
        tokens = {new.row: self._tokens_of(new) for new in plan.new}
        held = set(plan.held_rows.tolist()) | set(plan.released_rows.tolist())
        for row, known in enumerate(self.tokens):
            if row not in tokens and row not in held:
                tokens[row] = known
        poisoned = [row for row, known in tokens.items() if self.poison in known]
        if poisoned:
            reason = f"ValueError: token {self.poison} in row {poisoned[0]}"
            raise RankFailed(0, reason, plan.step_id, "sample", is_step_error=self.poison_is_step_error)

    def statuses(self) -> tuple[RankStatus, ...]:
        return (RankStatus(0, 0, "here", "fake", "idle"),)

    def close(self) -> None:
        self.closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.command is not None:
            self.commands.append(plan.command)
            self._forget(KvTiers.NONE)
            self.files.reset()
            return StepResult(plan.step_id, plan.epoch, 0, command_error=self.command_error)
        kv_reports: tuple[KvReport, ...] = ()
        if self.kv_peer is not None:
            kv_reports = self.kv_peer.apply(plan.kv)
        self._apply(plan)
        scheduled = {row: 1 for row, on in enumerate(self.decoding) if on and row not in plan.held_rows}
        scheduled |= dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))
        scores = self._scores(plan)
        cut_states = self._states_at_cuts(plan)
        for row, count in scheduled.items():
            self._write(row, count)
        most_drafted = dict(zip(plan.draft_rows.tolist(), plan.draft_lens.tolist(), strict=True))
        assert all(scheduled[row] == 1 and self.decoding[row] for row in most_drafted)
        sampled, states, counts, num_drafted = [], [], [], []
        pooled: dict[int, list[float]] = {}
        for row in sorted(scheduled):
            state = self._read(row, scheduled[row])
            self.num_hidden[row] += scheduled[row]
            if self.num_computed[row] < len(self.tokens[row]):
                continue
            if self.pooling[row] is not None:
                pooled[row] = self._pool(row, state)
                continue
            self.decoding[row] = True
            drafts = self._draft(state, most_drafted.get(row, 0))
            own = self._verify(row, state, drafts)
            sampled += [row] * len(own)
            states += own
            counts.append(len(own))
            num_drafted.append(len(drafts))
        self.num_executed_tokens += sum(scheduled.values())
        for source, destination in plan.state_saves.tolist():
            self.states[destination] = self.states[source]
        for destination, state in cut_states.items():
            self.states[destination] = state
        token_ids = np.array([next_token(state) for state in states], np.int32)
        logprobs = self._logprobs(sampled, states)
        reports = tuple(LoraReport(0, load.adapter_id, f"digest of {load.path}") for load in plan.lora_loads)
        result = StepResult(
            plan.step_id, plan.epoch, 0, token_ids, logprobs, prompt_logprobs=scores, lora_reports=reports
        )
        if self._config.kv_directories:
            self.files.begin(plan.stored_orders)
            result = replace(result, stored_reports=self.files.end_orders(self.host_kv, self.host_states))
        if pooled:
            result = replace(result, pooled=_pooled(pooled))
        result = replace(result, kv_reports=kv_reports)
        if not any(num_drafted):
            return result
        return replace(
            result, token_counts=np.array(counts, np.int32), num_drafted=np.array(num_drafted, np.int32)
        )

    def _states_at_cuts(self, plan: StepPlan) -> dict[int, bytes]:
        """Return the states that the step saves before the end of their chunks, by the slots that get them."""
        found = dict[int, bytes]()
        lens = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True))
        for (source, destination), tail in zip(
            plan.state_saves.tolist(), plan.save_tails.tolist(), strict=False
        ):
            if tail:
                row = self.tables.state_slots.tolist().index(source)
                assert 0 < tail < lens[row], (
                    f"row {row} is to be cut {tail} tokens before the end of its chunk"
                )
                state, start = self._state_before(row), self.num_computed[row]
                for place in range(start, start + lens[row] - tail):
                    state = chain(state, self._input(row, place))
                found[destination] = state
        return found

    def _pool(self, row: int, state: bytes) -> list[float]:
        """Return the vector of a row: its next token, and the number of tokens that it pools."""
        pooling = self._config.model.pooling
        assert pooling is not None, f"row {row} pools, and the model does not"
        num_tokens = len(self.tokens[row])
        return [next_token(state), num_tokens if pooling.pooling_type == "last" else self.num_hidden[row]]

    def _draft(self, state: bytes, most: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(self.rng.integers(most + 1) if most else 0):
            is_right = self.rng.random() < self.draft_accuracy
            drafts.append(next_token(state) if is_right else int(self.rng.integers(VOCAB_SIZE)))
            state = chain(state, drafts[-1])
        return drafts

    def _verify(self, row: int, state: bytes, drafts: list[int]) -> list[bytes]:
        """Write the KV of all drafted tokens; append the samples that count, and return the states they are of."""
        start, states = self.num_computed[row], [state]
        for place, token_id in enumerate(drafts, start):
            state = chain(state, token_id)
            assert place < self.tables.lens[row] * self.block_size, f"row {row} has no block for its drafts"
            self._store(row, place, state)
            if next_token(states[-1]) == token_id and len(states) == place - start + 1:
                states.append(state)
        self.tokens[row] += [next_token(each) for each in states]
        self.num_computed[row] += len(states) - 1
        self.planned_computed[row] += len(states) - 1
        if self.states:
            self.states[self.tables.state_slots[row]] = states[-1]
        return states

    def _scores(self, plan: StepPlan) -> PromptLogprobs | None:
        """Return the log-probabilities of prompt tokens, from the positions that the chunks compute."""
        entries = []
        for row, count in zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True):
            scoring, start, state = self.scoring[row], self.num_computed[row], self._state_before(row)
            for place in range(start + 1, start + count + 1):
                state = chain(state, self._input(row, place - 1))
                if scoring is not None and scoring.start <= place < scoring.end:
                    entries.append((row, place, float(logprobs_of(state)[self.tokens[row][place]])))
        if not entries:
            return None
        rows, places, chosen = zip(*entries, strict=True)
        width = np.zeros((len(rows), 0))
        chosen_only = Logprobs(
            np.array(places, np.int32),
            np.array(chosen, np.float32),
            np.ones(len(rows), np.int32),
            width.astype(np.int32),
            width.astype(np.float32),
        )
        return PromptLogprobs(np.array(rows, np.int32), chosen_only)

    def _logprobs(self, rows: list[int], states: list[bytes]) -> Logprobs | None:
        asked = [(index, row) for index, row in enumerate(rows) if self.num_logprobs[row] is not None]
        if not asked:
            return None
        width = max(self.num_logprobs[row] or 0 for _, row in asked)
        whole = np.stack([logprobs_of(states[index]) for index, _ in asked])
        top_ids = np.argsort(-whole, axis=1, kind="stable")[:, :width].astype(np.int32)
        chosen = np.array([whole[i, next_token(states[j])] for i, (j, _) in enumerate(asked)], np.float32)
        ranks = (whole > chosen[:, None]).sum(axis=1, dtype=np.int32) + 1
        index = np.array([index for index, _ in asked], np.int32)
        return Logprobs(index, chosen, ranks, top_ids, np.take_along_axis(whole, top_ids, axis=1))

    def _apply(self, plan: StepPlan) -> None:
        _apply_to_tables(self.tables, plan)
        for row in plan.released_rows:
            self.decoding[row] = False
            self.tokens[row] = []
            self.seen[row], self.images_at[row] = [], {}
            self.constraints[row] = None
        for new in plan.new:
            assert not self.tokens[new.row], f"row {new.row} is taken"
            self.constraints[new.row] = self._constraint_of(new)
            self.tokens[new.row] = self._tokens_of(new)
            self.seen[new.row] = see(self.tokens[new.row], new.media)
            self.images_at[new.row] = {
                place: (media_id, item.digest)
                for item, media_id in zip(new.media, new.media_ids.tolist(), strict=True)
                for place in range(item.start, item.end)
            }
            self.num_computed[new.row] = new.num_computed_tokens
            self.num_logprobs[new.row] = new.sampling.logprobs
            self.scoring[new.row] = new.sampling.scoring
            self.pooling[new.row] = new.pooling
            self.num_hidden[new.row] = 0
        self._encode(plan)
        digest = add_digests(self.tables.digest, outputs_digest([*self.outputs, *self.in_part]))
        assert digest == plan.digest, f"block tables or encoder outputs differ at step {plan.step_id}"
        self._check_partitions(plan)
        for source, destination in plan.swap_out.tolist():
            self.host_kv[destination] = list(self.kv[source])
        for source, destination in plan.swap_in.tolist():
            self.kv[destination] = list(self.host_kv[source])
        assert not set(plan.copies[:, 0].tolist()) & set(plan.copies[:, 1].tolist()), "a copy is copied on"
        for source, destination in plan.copies.tolist():
            self.kv[destination] = list(self.kv[source])
        for source, destination in plan.state_swap_out.tolist():
            self.host_states[destination] = self.states[source]
        for source, destination in plan.state_swap_in.tolist():
            self.states[destination] = self.host_states[source]
        copies = plan.state_copies
        assert not set(copies[:, 0].tolist()) & set(copies[:, 1].tolist()), "a copy of a state is copied on"
        for source, destination in copies.tolist():
            self.states[destination] = self.states[source]
        for row, token_id in zip(plan.selected_rows.tolist(), plan.selected_ids.tolist(), strict=True):
            assert self.num_computed[row] == len(self.tokens[row]) - 1, f"row {row} is past its newest token"
            self.tokens[row][-1] = token_id

    def _tokens_of(self, new: NewSequence) -> list[int]:
        """Return all known tokens of a new sequence, of a fork with those that its parent has."""
        tokens: list[int] = new.token_ids.tolist()
        if new.source_row is None:
            assert not new.num_source_tokens, f"row {new.row} is to have tokens of no row"
            return tokens
        tokens = self.tokens[new.source_row][: new.num_source_tokens] + tokens
        assert len(tokens) == new.num_tokens, f"row {new.source_row} lacks tokens for row {new.row}"
        parent = self.tokens[new.source_row]
        assert parent[: len(tokens) - 1] == tokens[:-1], f"row {new.row} is no fork of its parent"
        return tokens

    def _constraint_of(self, new: NewSequence) -> OutputConstraint | None:
        """Return the constraint of a new sequence, its own or that of the row from which it is forked.

        A constraint of `constraint_for` must be that of the sequence's prompt.
        """
        constraint, tokens = new.sampling.constraint, self._tokens_of(new)
        if new.takes_constraint:
            assert constraint is None, f"row {new.row} has two constraints"
            assert new.source_row is not None, f"row {new.row} is to have the constraint of no row"
            constraint = self.constraints[new.source_row]
            assert constraint is not None, f"row {new.source_row} has no constraint for row {new.row}"
            assert new.num_source_tokens <= constraint.num_prompt_tokens, "a constraint lacks tokens"
        if constraint is not None:
            prompt = tokens[: constraint.num_prompt_tokens]
            assert constraint == constraint_for(prompt), f"row {new.row} has a constraint of another prompt"
        return constraint

    def _check_partitions(self, plan: StepPlan) -> None:
        """Check that no block moves from one rank's memory to that of another."""
        cache = self._config.cache
        on_device, on_host = cache.num_kv_blocks, cache.num_host_kv_blocks + 1
        assert on_device is not None
        for moves, first, second in (
            (plan.copies, on_device, on_device),
            (plan.swap_out, on_device, on_host),
            (plan.swap_in, on_host, on_device),
        ):
            assert (moves[:, 0] // first == moves[:, 1] // second).all(), "a block moves between partitions"

    def _write(self, row: int, count: int) -> None:
        state = self._state_before(row)
        if self.states and self.num_computed[row]:
            slot = int(self.tables.state_slots[row])
            assert slot, f"row {row} has the scratch slot"
            assert self.states[slot] == state, f"row {row} has the state of another prefix"
        for position in range(self.num_computed[row], self.num_computed[row] + count):
            if position in self.images_at[row]:
                media_id, digest = self.images_at[row][position]
                assert self.outputs.get(media_id) == digest, f"row {row} reads an image that is not encoded"
            state = chain(state, self._input(row, position))
            self._store(row, position, state)
        if self.states:
            self.states[self.tables.state_slots[row]] = state
        self.num_computed[row] += count
        assert self.num_computed[row] <= self.tables.lens[row] * self.block_size, f"row {row} has no block"

    def _store(self, row: int, position: int, state: bytes) -> None:
        """Store the KV of a token in all groups."""
        index, offset = divmod(position, self.block_size)
        for group in range(len(self.groups)):
            block = self.tables.ids[group * self.tables.num_rows + row, index]
            assert block != 0, "a live row writes the scratch block"
            self.kv[block][offset] = group, state

    def _state_before(self, row: int) -> bytes:
        state = b""
        for place in range(self.num_computed[row]):
            state = chain(state, self._input(row, place))
        return state

    def _read(self, row: int, num_queries: int) -> bytes:
        """Every position that the last `num_queries` tokens read; each must hold the KV of this row's own prefix."""
        state, end = b"", self.num_computed[row]
        firsts = [max(0, end - num_queries + 1 - kind.window) if kind.window else 0 for kind in self.groups]
        for position in range(end):
            state = chain(state, self._input(row, position))
            index, offset = divmod(position, self.block_size)
            for group, first in enumerate(firsts):
                if position < first:
                    continue
                block = self.tables.ids[group * self.tables.num_rows + row, index]
                assert block != 0, "a live row reads the scratch block"
                found = self.kv[block][offset]
                assert found == (group, state), (
                    f"row {row} finds foreign KV at position {position}, block {block} of group {group}"
                )
        return state
