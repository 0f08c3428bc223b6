"""Scheduler: the control plane of one replica. Takes requests and step results; returns plans and TokenBatches.

Pure Python and numpy: no torch, no Ray, no clock (time is passed in). `schedule` may be called again before the
result of the previous step is applied; sampled tokens that are not known yet are placeholders that only the ranks
know. A stop that is found one step late wastes that step's token, which is dropped here and never sent.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from ...proto.block_map import BlockMap
from ...proto.block_tables import IntArray
from ...proto.codec import NO_INTS
from ...proto.config import EngineConfig
from ...proto.digests import make_root, whole_prompt_salt
from ...proto.engine_command import COMMAND_TIMEOUT_S
from ...proto.errors import QuireError, RankFailed, ReplicaUnavailable, RequestQuarantined
from ...proto.lora import LoraReference
from ...proto.step import StepPlan, StepResult
from ...proto.stream import Finish, FinishReason, Lent, MediaUpload, Recall, Recalled, Submit, TokenBatch
from ..kv.block_manager import BlockManager
from ..kv.kv_tiers import KvTiers
from ..sequences.beam_group import BeamGroup
from ..sequences.beam_search import BeamSearch
from ..sequences.repetition import RepetitionDetector
from ..sequences.sequence import Sequence
from .admission.admission_checks import check_admission, max_len_of
from .admission.forecast import Forecast
from .control.block_map import make_block_map
from .control.drain import Drainer
from .control.engine_control import EngineControl
from .planning.planner import Planner
from .queue.deadlines import deadline_of
from .queue.kv_moves import FetchedPrompts, KvMoves, NoKvMoves
from .queue.lora_adapters import LoraAdapters
from .queue.media import MediaQueue
from .queue.policy import rank_of
from .replies.outbox import Outgoing, error_finish
from .replies.retained_outputs import KnownOutput
from .results.equal_steps import DecodedSteps, EqualSteps
from .results.observers import (
    CostObserver,
    DraftObserver,
    StepObserver,
    SuspectObserver,
    TimeObserver,
)
from .results.result_processor import ResultProcessor
from .state import SchedulerState, row_of
from .steps.metrics import SchedulerStats, Throughput
from .steps.step_times import UNMEASURED_S, StepDeadlines


@dataclass(frozen=True, slots=True)
class PresentStep:
    """The step that the ranks compute.

    Attributes:
        began_at: on the scheduler's clock.
    """

    step_id: int
    began_at: float
    deadlines: StepDeadlines


class Scheduler:
    """The owner of all blocks and sequences of a replica.

    Args:
        config: configuration with the number of blocks resolved.
        epoch: number of the worker group's life that the plans are for; read-only from outside.
    """

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        self.config = config
        self.epoch = epoch
        self._state = SchedulerState(config)
        self._forecast = Forecast(self._state)
        self._planner = Planner(self._state, self._forecast, epoch)
        drafts = self._state.draft_switch or self._state.jump_forward
        observers: tuple[StepObserver, ...] = (
            TimeObserver(self._state),
            CostObserver(self._state),
            SuspectObserver(self._state),
            *(() if drafts is None else (DraftObserver(self._state, drafts),)),
        )
        self._processor = ResultProcessor(self._state, epoch, observers)
        self._drainer = Drainer(self._state)
        self._fetched = FetchedPrompts()
        self.control = EngineControl(self._state)
        self._equal_steps = EqualSteps(self._state, self._processor)
        if self._state.lora is not None and config.lora is not None:
            for reference in config.lora.modules:
                self._state.lora.register(reference)

    @property
    def blocks(self) -> BlockManager:
        return self._state.blocks

    @property
    def stats(self) -> SchedulerStats:
        return self._state.stats

    @property
    def gateways(self) -> tuple[bytes, ...]:
        """Return the gateways that have requests."""
        return tuple(self._state.requests.gateways)

    @property
    def num_in_flight(self) -> int:
        """Return the number of planned steps whose result was not applied."""
        return len(self._state.in_flight)

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return len(self._state.alive) - len(self._state.running)

    @property
    def num_used_tokens(self) -> int:
        """Return the tokens whose KV running sequences hold."""
        return self._state.rows.num_scheduled_tokens

    @property
    def num_queued_tokens(self) -> int:
        """Return the known tokens that are not planned yet, of waiting sequences and of running prefills."""
        num_scheduled = self._state.rows.num_scheduled
        running = sum(len(s.token_ids) - int(num_scheduled[row_of(s)]) for s in self._state.prefilling)
        return self._state.waiting.backlog.num_tokens + running

    @property
    def throughput(self) -> Throughput:
        """Return the tokens computed and the time that they took; read-only."""
        return self._state.throughput

    @property
    def prefill_tokens_per_s(self) -> float:
        """Return the tokens computed per second in steps full of prompt tokens; 0 until measured."""
        return self._state.costs.prefill_tokens_per_s

    @property
    def prefill_delay(self) -> float:
        """Return the share of a prompt's time by which it delays each running sequence."""
        return self._state.costs.prefill_delay

    @property
    def kv_moves(self) -> KvMoves | NoKvMoves:
        """Return the figures of KV that comes and leaves; read-only."""
        return self._state.kv_moves

    @property
    def is_draining(self) -> bool:
        return self._drainer.is_on

    def oldest_wait_s(self, now: float) -> float:
        """Return the longest time that a sequence has waited for its first row."""
        # `alive` is in the order of arrival, so that the search ends at the first that has not run.
        arrivals = (s.arrived_at for s in self._state.alive.values() if s.first_run_at is None)
        return now - next(arrivals, now)

    @property
    def lora(self) -> LoraAdapters | None:
        """Return the adapters; None if adapters are off."""
        return self._state.lora

    @property
    def has_work(self) -> bool:
        return bool(self._state.alive or self._state.in_flight)

    def add(self, gateway: bytes, submit: Submit, now: float) -> Finish | None:
        """Queue a request; return a Finish if it is rejected. A draining replica reports MOVED in the outbox."""
        if submit.fetch_only:
            self._fetch(gateway, submit, now)
            return None
        if submit.lend_only:
            return self._lend(gateway, submit, now)
        if self._drainer.is_on:
            self._drainer.reject(gateway, submit)
            return None
        error = self.control.refusal()
        error = error or check_admission(self._state, self._forecast, gateway, submit, now)
        if error is not None:
            return error_finish(submit.handle, error)
        sequences = self._make_sequences(gateway, submit, now)
        width = submit.sampling.beam_width
        self._state.add_request(sequences, None if width is None else self._make_beams(sequences[0], width))
        self._state.blocks.tiers.read_ahead(sequences[0], self._state.costs.prefill_tokens_per_s, now)
        if submit.media:
            self._state.media.ask(
                sequences[0], self._state.blocks.prefixes.num_cached_tokens(sequences[0]), now
            )
        return None

    def _fetch(self, gateway: bytes, submit: Submit, now: float) -> None:
        """Read the blocks of a sequence that will come, if the ranks take orders."""
        control, whole = self.control, self._fetched.complete(gateway, submit)
        if whole is None or self._drainer.is_on or control.refusal():
            return
        if not (control.holds_steps or control.holds_admission):
            self._state.kv_moves.fetch(self._make_sequences(gateway, whole, now)[0], now, self.num_running)

    def _lend(self, gateway: bytes, submit: Submit, now: float) -> Finish | None:
        """Lend the cached beginning of a prompt; return a Finish if there is none."""
        offer = None
        if not self._drainer.is_on and not self.control.refusal():
            offer = self._state.kv_moves.lend(self._make_sequences(gateway, submit, now)[0], now)
        if offer is None:
            return error_finish(submit.handle, ReplicaUnavailable("it has no blocks of the prompt to lend"))
        self._state.outbox.add(gateway, TokenBatch(0, lent=(Lent(submit.handle, offer),)))
        return None

    def receive_media(self, message: MediaUpload, now: float) -> None:
        """Take a piece of an image; one that nobody waits for is dropped."""
        self._state.receive_media(message, now)

    @property
    def media(self) -> MediaQueue:
        """Return the images of the requests."""
        return self._state.media

    def abort(self, gateway: bytes, handle: int, now: float) -> bool:
        """Abort a sequence, a beam search as a whole; sends no Finish. Returns False for an unknown handle."""
        sequence = self._state.requests.get((gateway, handle))
        if sequence is None:
            return False
        if not isinstance(sequence, BeamGroup):
            self._state.retained.keep(sequence, *self._interrupted(sequence, now), now)
        self._state.end_request((gateway, handle))
        return True

    def stop(self, gateway: bytes, handle: int, now: float) -> Finish | None:
        """End a sequence whose gateway found a stop string. Returns None if it has ended already."""
        sequence = self._state.requests.get((gateway, handle))
        if sequence is None or isinstance(sequence, BeamGroup):
            return None
        num_tokens = len(self._state.known_tokens(sequence))
        self._state.pace.observe_output(num_tokens - sequence.num_prompt_tokens, has_stopped=True)
        self.abort(gateway, handle, now)
        self.stats.count_finished(1)
        return sequence.finish(FinishReason.STOP, num_tokens, now)

    def drop_gateway(self, gateway: bytes, now: float) -> list[int]:
        """Abort all sequences of a gateway that does not read; return their handles."""
        handles = self._state.requests.handles_of(gateway)
        for handle in handles:
            self.abort(gateway, handle, now)
        self._state.requests.forget_idle()
        return handles

    def recall(self, recall: Recall, now: float) -> Recalled:
        """Return the tokens of a request's outputs that run, or ended a while ago at most."""
        state = self._state
        state.retained.drop_expired(now)
        found = state.retained.find(recall)
        for sequence in state.outputs_of(recall.request_id):
            output = KnownOutput.of(sequence, *self._interrupted(sequence, now))
            answer = None if output is None else output.answer(recall)
            found += [] if answer is None else [answer]
        return Recalled(recall.query_id, tuple(found))

    def _interrupted(self, sequence: Sequence, now: float) -> tuple[array[int], Finish]:
        """Return the tokens of a sequence that has not ended, and the Finish with which another replica continues."""
        token_ids = self._state.known_tokens(sequence)
        return token_ids, sequence.finish(FinishReason.MOVED, len(token_ids), now)

    def schedule(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed now."""
        self.wait(now)
        if (command := self.control.plan(self.epoch, now)) is not None:
            return command
        if self.control.holds_steps:
            return None
        self._planner.admits = not self.control.holds_admission
        return self._planner.plan(now)

    def apply(self, result: StepResult, now: float) -> Outgoing:
        """Apply the result of the oldest step in flight; return the messages for gateways.

        Raises:
            ProtocolError: the result is of another step or epoch, or has the wrong number of tokens.
        """
        step = self._processor.due_step(result)
        if step.is_command:
            self.control.on_result(result)
            return self.take_outgoing()
        return self._processor.apply(step, result, now) + self.take_outgoing()

    def plan_equal_steps(self, most: int) -> tuple[int, IntArray]:
        """Return how many of the next steps, at most `most`, decode a token of the same rows and end none.

        Unless there are none, some of them must be run: also returns the rows that the first one releases.
        """
        control = self.control
        if self._drainer.is_on or control.holds_steps or control.holds_admission:
            return 0, NO_INTS
        count = self._equal_steps.count(most)
        return count, self._equal_steps.take_released() if count else NO_INTS

    def run_equal_steps(self, steps: DecodedSteps) -> IntArray:
        """Plan and apply some of these steps; return the handles of their tokens."""
        return self._equal_steps.run(steps)

    def take_outgoing(self) -> Outgoing:
        """Return the messages that are not part of a step's result: expired deadlines, failures, moves."""
        return self._state.outbox.take()

    def drain(self, grace_s: float, now: float) -> None:
        """Reject new requests, and hand off the others: waiting ones now, running ones after `grace_s`."""
        self._drainer.begin(now + grace_s)

    @property
    def present_step(self) -> PresentStep | None:
        """Return the oldest step in flight, which the ranks compute; None if none is in flight."""
        step, times = self._state.in_flight.oldest, self._state.step_times
        if step is None:
            return None
        deadlines = times.deadlines(step.num_tokens, self.config.scheduler.step_timeout_s)
        if step.is_command:
            deadlines = StepDeadlines(None, COMMAND_TIMEOUT_S, COMMAND_TIMEOUT_S)
        if step.encodes:
            failed_s = max(deadlines.failed_s, UNMEASURED_S, self.config.scheduler.step_timeout_s)
            deadlines = replace(deadlines, failed_s=failed_s)
        return PresentStep(step.step_id, times.began_at(step.planned_at), deadlines)

    def interrupt(self, failure: RankFailed, now: float) -> None:
        """Take back all steps in flight: the worker group failed. All sequences wait until `resume`.

        A request that has failed the group repeatedly ends with RequestQuarantined.
        """
        state = self._state
        step = state.in_flight.find(failure.step_id)
        suspects = state.requests_in(step) if step is not None else set()
        state.interrupt_all(now)
        cause = state.quarantine.on_failure(suspects, is_step_error=failure.is_step_error)
        if cause is not None:
            state.fail_arrival(cause, lambda sequence: _quarantined(sequence, failure))

    def wait(self, now: float) -> None:
        """End sequences whose deadline has passed, and hand off those of a draining replica, without a plan."""
        self._state.requests.forget_idle()
        self._state.kv_moves.expire(now, self._state.in_flight.newest_id)
        self._drainer.hand_off(now)
        self._state.fail_expired(now)

    def resume(self, epoch: int, kept: KvTiers, *, has_new_ranks: bool) -> None:
        """Plan for the rebuilt group, whose rows are empty.

        Args:
            kept: memories whose content survived on all ranks.
            has_new_ranks: processes were replaced.
        """
        self.epoch = self._planner.epoch = self._processor.epoch = epoch
        self._state.keep_tiers(kept)
        self.stats.count_kept_tokens(sum(each.num_host_tokens for each in self._state.alive.values()))
        self.control.on_recovery(has_new_ranks=has_new_ranks)

    def fail_all(self, error: QuireError) -> Outgoing:
        """End every request with an error.

        All ends are in the outbox before any state is taken apart, which may raise after an error of the scheduler.
        """
        state = self._state
        handles: dict[bytes, list[int]] = {}
        for (gateway, handle), _ in state.requests.items():
            handles.setdefault(gateway, []).append(handle)
        for gateway, failed in handles.items():
            state.outbox.fail(gateway, failed, error)
        while state.requests:
            key, _ = next(iter(state.requests.items()))
            state.end_request(key)
        state.abandon_steps()
        return self.take_outgoing()

    def block_map(self, query_id: int) -> BlockMap:
        """Return the states of the KV blocks and their holders."""
        return make_block_map(self._state, query_id)

    def check_integrity(self) -> None:
        """Recount blocks, rows and queues. Raises AssertionError at the first inconsistency."""
        self._state.check_integrity()

    def _known_adapter(self, reference: LoraReference | None) -> LoraReference | None:
        """Return an adapter with the content that a gateway names, if it is that of the files here."""
        if reference is None or self._state.lora is None:
            return reference
        is_same = reference.content == self._state.lora.content_of(reference)
        return reference if is_same else replace(reference, content="")

    def _make_sequences(self, gateway: bytes, submit: Submit, now: float) -> list[Sequence]:
        """Return one sequence per sampled output; a beam search begins with one."""
        params, num_generated = submit.sampling, len(submit.generated_token_ids)
        lora, salt = self._known_adapter(submit.lora), submit.salt
        if self.config.model.sees_whole_prompt:
            salt = whole_prompt_salt(salt, submit.prompt_token_ids, submit.media)
        known = np.concatenate([submit.prompt_token_ids, submit.generated_token_ids])
        seq_ids = [
            self._state.next_seq_id() for _ in range(params.num_sequences if params.beam_width is None else 1)
        ]
        return [
            Sequence(
                seq_id=seq_id,
                arrival=seq_ids[0],
                gateway=gateway,
                handle=submit.handle + index,
                request_id=submit.request_id,
                sampling=params,
                seed=(params.seed or 0) + index,
                num_prompt_tokens=len(submit.prompt_token_ids),
                max_len=max_len_of(self.config, submit),
                token_ids=array("i", known.astype("i4").tobytes()),
                eos_token_ids=() if params.ignore_eos or submit.pooling else self.config.model.eos_token_ids,
                arrived_at=now,
                root=self.control.root_of(
                    make_root(
                        self.config.model.name,
                        salt,
                        "" if lora is None else lora.cache_key,
                        tenant=submit.tenant,
                        pool=submit.prefix_pool,
                    )
                ),
                has_common_root=not (salt or submit.lora or submit.tenant or submit.prefix_pool),
                weights_version=self.control.weights_version,
                tenant=submit.tenant,
                prefix_pool=submit.prefix_pool,
                rank=rank_of(submit),
                deadline=deadline_of(submit, now),
                # A migrated sequence goes before all that never ran, and all its tokens are to be recomputed.
                has_run=num_generated > 0,
                num_lost_tokens=known.size - 1 if num_generated else 0,
                scores_prompt=params.prompt_logprobs is not None and index == 0 and not num_generated,
                constraint=submit.constraint,
                repetition=_make_detector(submit),
                lora=lora,
                pooling=submit.pooling,
                kv=submit.kv if len(seq_ids) == 1 and params.beam_width is None else None,
                prefill_only=submit.prefill_only and not params.is_ranked and submit.pooling is None,
                media=submit.media,
                pools_all_tokens=submit.pooling is not None and not self._pools_last_token,
            )
            for index, seq_id in enumerate(seq_ids)
        ]

    @property
    def _pools_last_token(self) -> bool:
        pooling = self.config.model.pooling
        return pooling is not None and pooling.pooling_type == "last"

    def _make_beams(self, first: Sequence, width: int) -> BeamGroup:
        params = first.sampling
        search = BeamSearch(
            width=width,
            max_new_tokens=first.max_len - first.num_prompt_tokens,
            min_new_tokens=params.min_tokens,
            stop_token_ids=first.eos_token_ids + params.stop_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        return BeamGroup(search, params.n, first.seq_id)


def _make_detector(submit: Submit) -> RepetitionDetector | None:
    """Return the detector of an output's repetitions, after the tokens that it has already."""
    params = submit.sampling.repetition_detection
    if params is None:
        return None
    detector = RepetitionDetector(params)
    detector.push(submit.generated_token_ids.tolist())
    return detector


def _quarantined(sequence: Sequence, failure: RankFailed) -> RequestQuarantined:
    return RequestQuarantined(
        f"request {sequence.request_id} failed the ranks repeatedly, at last alone, and is not run again: {failure}"
    )
