"""Scheduler: the control plane of one replica. Requests in, plans out, results in, news out.

Pure Python and numpy: no torch, no Ray, no clock (time is passed in). `schedule` may be called again before the
result of the step before is applied; sampled tokens that are not known yet are placeholders that only the ranks
know. A stop that is found one step late wastes that step's token, which is dropped here and never told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from ...proto.config import EngineConfig
from ...proto.errors import QuireError
from ...proto.step import StepPlan, StepResult
from ...proto.stream import Finish, FinishReason, Submit, TokenBatch
from ..kv.block_manager import BlockManager
from ..kv.prefix_cache import make_root
from ..sequences.beam_group import BeamGroup
from ..sequences.beam_search import BeamSearch
from ..sequences.sequence import Sequence
from .admission_checks import find_problem, length_limit
from .drain import Drainer
from .metrics import SchedulerStats
from .planner import Planner
from .result_processor import News, ResultProcessor
from .state import SchedulerState, row_of


class Scheduler:
    """Owns every block and every sequence.

    Args:
        config: with the number of blocks resolved.
        epoch: which life of the worker group the plans are for.
    """

    def __init__(self, config: EngineConfig, epoch: int = 1) -> None:
        self.config = config
        self._state = SchedulerState(config)
        self._planner = Planner(self._state, epoch)
        self._collector = ResultProcessor(self._state, epoch)
        self._drainer = Drainer(self._state)

    @property
    def blocks(self) -> BlockManager:
        return self._state.blocks

    @property
    def stats(self) -> SchedulerStats:
        return self._state.stats

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result was not applied."""
        return len(self._state.in_flight)

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return len(self._state.alive) - len(self._state.running)

    @property
    def num_used_tokens(self) -> int:
        """Tokens whose KV running sequences hold."""
        return int(self._state.rows.num_scheduled.sum())

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens that are not planned yet: of those that wait, and of prompts under way."""
        num_scheduled = self._state.rows.num_scheduled
        waiting = sum(
            len(s.token_ids) for s in self._state.alive.values() if s.row is None and s.leader is None
        )
        begun = sum(len(s.token_ids) - int(num_scheduled[row_of(s)]) for s in self._state.prefilling)
        return waiting + begun

    @property
    def tokens_per_s(self) -> float:
        """Computed a second of work, prompt and sampled tokens together; 0 while nothing is known."""
        return self._state.throughput.tokens_per_s

    @property
    def is_draining(self) -> bool:
        return self._drainer.is_on

    def oldest_wait_s(self, now: float) -> float:
        """How long the one has waited that waits longest for its first row."""
        arrivals = [s.arrived_at for s in self._state.alive.values() if s.first_run_at is None]
        return now - min(arrivals) if arrivals else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._state.alive or self._state.in_flight)

    def add(self, gateway: bytes, submit: Submit, now: float) -> Finish | None:
        """Queues a request; returns a Finish when it is refused. A draining replica's MOVED is among the news."""
        if self._drainer.is_on:
            self._drainer.refuse(gateway, submit)
            return None
        problem = find_problem(self._state, gateway, submit)
        if problem is not None:
            return Finish(
                submit.handle, FinishReason.ERROR, grpc_status=problem.grpc_status, error=str(problem)
            )
        first, *siblings = self._make_sequences(gateway, submit, now)
        for sequence in (first, *siblings):
            self._state.add(sequence)
            self._state.requests[gateway, sequence.handle] = sequence
        for sibling in siblings:
            sibling.leader = first
        first.siblings = siblings
        if submit.sampling.beam_width is not None:
            first.beams = self._make_beams(first, submit.sampling.beam_width)
            for handle in range(submit.handle, submit.handle + submit.sampling.n):
                self._state.requests[gateway, handle] = first.beams
        self._state.waiting.push(first)
        return None

    def abort(self, gateway: bytes, handle: int) -> bool:
        """Ends a sequence without a word; False where there is none such. A beam search ends as a whole."""
        if (gateway, handle) not in self._state.requests:
            return False
        self._state.end_request((gateway, handle))
        return True

    def stop(self, gateway: bytes, handle: int, now: float) -> Finish | None:
        """Ends a sequence whose gateway found a stop string; None where it has ended already."""
        sequence = self._state.requests.get((gateway, handle))
        if sequence is None or isinstance(sequence, BeamGroup):
            return None
        num_tokens = len(self._state.known_tokens(sequence))
        self.abort(gateway, handle)
        self.stats.num_finished += 1
        return sequence.finish(FinishReason.STOP, num_tokens, now)

    def drop_gateway(self, gateway: bytes) -> list[int]:
        """Aborts all sequences of a gateway that cannot be told of them; returns their handles."""
        handles = [handle for owner, handle in self._state.requests if owner == gateway]
        for handle in handles:
            self.abort(gateway, handle)
        self._state.gateways.pop(gateway, None)
        return handles

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing that could be computed now."""
        self._drainer.give_back(now)
        return self._planner.plan(now)

    def apply(self, result: StepResult, now: float) -> News:
        """Takes in the result of the earliest step in flight; returns what is to be told, as (gateway, news).

        Raises:
            ProtocolError: the result is of another step or epoch, or has the wrong number of tokens.
        """
        return self._collector.take(result, now) + self.take_news()

    def take_news(self) -> News:
        """What is to be told beside the results of steps: deadlines that passed, failures."""
        news, self._state.news = self._state.news, []
        return news

    def drain(self, grace_s: float, now: float) -> None:
        """Takes no more requests, and gives back those it has: what waits now, what runs after `grace_s`."""
        self._drainer.begin(now + grace_s)

    def fail_all(self, error: QuireError) -> News:
        """Ends every request with an error.

        What is to be told is among the news before anything is taken apart, which may fail after a fault of our own.
        """
        ends: dict[bytes, list[Finish]] = {}
        for gateway, handle in self._state.requests:
            finish = Finish(handle, FinishReason.ERROR, grpc_status=error.grpc_status, error=str(error))
            ends.setdefault(gateway, []).append(finish)
        self._state.news += [
            (gateway, TokenBatch(0, finished=tuple(of_it))) for gateway, of_it in ends.items()
        ]
        while self._state.requests:
            self._state.end_request(next(iter(self._state.requests)))
        while self._state.in_flight:
            self._state.blocks.lift_fences(self._state.in_flight.popleft().step_id)
        return self.take_news()

    def check_integrity(self) -> None:
        """Recounts blocks, rows and queues; raises AssertionError on the first thing that is out of place."""
        self._state.check_integrity()

    def _make_sequences(self, gateway: bytes, submit: Submit, now: float) -> Iterator[Sequence]:
        """One for each answer that is sampled; a beam search begins as one."""
        params, num_prompt_tokens = submit.sampling, len(submit.prompt_token_ids)
        num_generated = len(submit.generated_token_ids)
        known = np.concatenate([submit.prompt_token_ids, submit.generated_token_ids])
        arrival = self._state.num_sequences_made + 1
        for index in range(params.num_sequences if params.beam_width is None else 1):
            yield Sequence(
                seq_id=self._state.next_seq_id(),
                arrival=arrival,
                gateway=gateway,
                handle=submit.handle + index,
                request_id=submit.request_id,
                sampling=params,
                seed=(params.seed or 0) + index,
                num_prompt_tokens=num_prompt_tokens,
                limit=length_limit(self.config, submit),
                token_ids=array("i", known.astype("i4").tobytes()),
                eos_token_ids=() if params.ignore_eos else self.config.model.eos_token_ids,
                arrived_at=now,
                root=make_root(self.config.model.name, submit.salt),
                tenant=submit.tenant,
                priority=submit.priority,
                deadline=None if submit.timeout_s is None else now + submit.timeout_s,
                # What ran elsewhere goes before all that never ran, and all that it has is to be recomputed.
                has_run=num_generated > 0,
                num_lost_tokens=known.size - 1 if num_generated else 0,
                scores_prompt=params.prompt_logprobs is not None and index == 0 and not num_generated,
            )

    def _make_beams(self, first: Sequence, width: int) -> BeamGroup:
        params = first.sampling
        search = BeamSearch(
            width=width,
            max_new_tokens=first.limit - first.num_prompt_tokens,
            min_new_tokens=params.min_tokens,
            stop_token_ids=first.eos_token_ids + params.stop_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        group = BeamGroup(search, num_answers=params.n)
        group.members = [first.seq_id]
        return group
