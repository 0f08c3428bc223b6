"""InProcessEngine: scheduler, step loop and one rank in this process. No Ray, no ZeroMQ, no other process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ...proto.config import EngineConfig
from ...proto.engine_command import EngineCommand
from ...proto.errors import InvalidRequest, QuireError, RankFailed, ReplicaUnavailable
from ...proto.replica_status import RankStatus, ReplicaStatus
from ...proto.step import EncoderInput, StepPlan, StepResult
from ...proto.stream import (
    ControlEngine,
    EngineControlled,
    MediaWanted,
    ReplicaMessage,
    Stop,
    TokenBatch,
    media_uploads,
)
from ...scheduler import EventSink, InMemoryMailbox, KvTiers, Rebuilt, Scheduler, StepLoop, recorded_ranks
from ...worker import (
    NO_COMPILATION,
    LaunchedStep,
    ModelRunner,
    SingleRank,
    compile_at_start,
    compute_device,
    on_device,
)
from ..fleet.replica.loading_bar import LoadingBar
from ..fleet.replica.stopwatch import Stopwatch
from ..text.requests.sequence_update import SequenceUpdate, updates_by_handle
from .engine import OutputCollector

if TYPE_CHECKING:
    from ..fleet.replica.client import ReplicaClient

_log = logging.getLogger(__name__)

_GATEWAY = b"in-process"
_QUERY_ID = 1  # 0 asks for no answer
# Bounds the memory of unread TokenBatches while no sequence ends.
_MAX_UNREAD = 64
# For stored blocks: the ranks' first report at the start, and the writes at the end, which begin in idle time.
_INDEX_TIMEOUT_S, _WRITE_TIMEOUT_S, _SETTLE_INTERVAL_S = 10.0, 30.0, 0.1


class InProcessGroup:
    """WorkerGroup of one rank, which launches each plan when it is broadcast, on any thread. A CPU executes it.

    Attributes:
        load_seconds: stage of the start |-> seconds.
    """

    def __init__(self, runner: ModelRunner, load_seconds: Mapping[str, float]) -> None:
        self._runner = runner
        self.load_seconds = load_seconds
        self._device = runner.device
        self._launched: deque[LaunchedStep] = deque()
        self._must_reset = False
        self._lost_device_by = ""

    def broadcast(self, plan: StepPlan) -> None:
        with on_device(self._device):
            self._reset_if_due()
            with self._noting_failure():
                self._launched.append(self._runner.launch(plan))

    def send_media(self, image: EncoderInput) -> None:
        with on_device(self._device):
            self._reset_if_due()
            self._runner.take_media(image)

    def _reset_if_due(self) -> None:
        if self._must_reset:
            self._runner.reset(has_new_ranks=False)
            self._must_reset = False

    def gather(self, timeout_s: float) -> StepResult:
        """Return the result of the oldest plan, when the device has computed it."""
        with self._noting_failure():
            return self._launched.popleft().result()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except RankFailed as error:
            if not error.is_step_error:
                self._lost_device_by = error.problem
            raise

    def check(self) -> None:
        """Never raises: the rank is this process."""

    def examine(self, waited_s: float, *, failed_s: float) -> None:
        """Never raises, as `check`."""

    def rebuild(self, epoch: int) -> Rebuilt:
        """Empty the rows of the rank after a step that failed.

        Raises:
            ReplicaUnavailable: this process can use its GPU no more.
        """
        if self._lost_device_by:
            raise ReplicaUnavailable(
                f"this process can use its GPU no more ({self._lost_device_by}); start it again"
            )
        self._launched.clear()
        self._must_reset = True  # on the thread of the steps, to which the CPU ops' thread pool belongs
        return Rebuilt(has_new_ranks=False, kept=KvTiers.ALL)

    def statuses(self) -> tuple[RankStatus, ...]:
        return (RankStatus(0, os.getpid(), socket.gethostname(), str(self._device), self._runner.stage),)

    def close(self) -> None:
        with on_device(self._device):
            self._runner.close()


def load_in_process(
    config: EngineConfig, *, compiles_ahead: bool = True
) -> tuple[EngineConfig, InProcessGroup]:
    """Load the model and allocate its KV cache; return the config with the number of blocks resolved, and the rank.

    A GPU is the current one of the calling thread.

    Args:
        compiles_ahead: on a GPU, compile kernels beside the reading of weights.

    Raises:
        ModelLoadError: the model directory cannot be read.
        ConfigError: the KV cache does not fit.
    """
    stopwatch = Stopwatch()
    device = compute_device(config.parallel.device)
    compilation = compile_at_start(config, device) if compiles_ahead else NO_COMPILATION
    with LoadingBar(1) as bar:
        runner = ModelRunner(config, SingleRank(), partial(bar.update, 0), device=device)
    stopwatch.lap("weights")
    compilation.wait()
    stopwatch.lap("compile")
    config = config.with_num_blocks(runner.num_blocks_that_fit())
    stopwatch.lap("profile")
    assert config.cache.num_kv_blocks is not None
    config = config.with_swap_rates([runner.allocate_cache(config.cache.num_kv_blocks)])
    stopwatch.lap("allocate")
    _log.info("%s loaded in this process: %s", config.model.name, stopwatch)
    return config, InProcessGroup(runner, stopwatch.laps)


class InProcessEngine:
    """The scheduler, step loop and worker of a replica, in this process. Implements `Engine`.

    Steps run on a thread of their own, because a Ctrl-C in the middle of a step would leave it half done. All calls
    use the same thread, since the thread pool of the CPU ops and memory that is used again belong to it.

    Attributes:
        config: configuration with the number of KV blocks resolved.
        scheduler: read by statistics and tests; the step loop drives it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config, self._group = load_in_process(config)
        self._open = ExitStack()
        self._ranks = self._open.enter_context(
            recorded_ranks(self._group, self.config, self.config.model.name)
        )
        self.scheduler = Scheduler(self.config)
        self._events = _publisher(self.config)
        self._thread = ThreadPoolExecutor(1, "steps")
        self._stepping = threading.Lock()
        self._settle(_INDEX_TIMEOUT_S)  # the first prompts shall find what is stored

    def _settle(self, timeout_s: float) -> None:
        """Run steps until all blocks are stored, and what is stored is known; only where blocks are stored.

        A batch leaves no idle time in which a server would do so.
        """
        stored, loop = self.scheduler.blocks.stored, self._loop(InMemoryMailbox())
        if not stored.is_on:
            return
        deadline = time.monotonic() + timeout_s

        def settle() -> None:
            while not stored.is_settled and time.monotonic() < deadline:
                if not loop.step():
                    loop.handle_messages(_SETTLE_INTERVAL_S)

        with self._stepping:
            self._thread.submit(settle).result()

    def run(self, collectors: list[OutputCollector], advance: Callable[[], None]) -> None:
        mailbox = InMemoryMailbox()
        loop = self._loop(mailbox)
        batch = _Batch(collectors, advance, mailbox, loop)
        try:
            self._thread.submit(self._serve, batch, loop).result()
        finally:
            batch.end()
            with self._stepping:
                pass  # until the step loop has ended
        if batch.error is not None:
            raise batch.error

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ReplicaClient]:
        from ..fleet.replica.client import SILENCE_MARGIN_S, ReplicaClient  # ZeroMQ, which LLM does without
        from .in_process_connection import InProcessConnection

        mailbox = InMemoryMailbox()
        name = self.config.model.name
        loop = StepLoop(self.scheduler, self._ranks, mailbox, name)
        timeout_s = self.config.scheduler.step_timeout_s + SILENCE_MARGIN_S
        connection = InProcessConnection(mailbox)
        client = ReplicaClient("in-process", name, silence_timeout_s=timeout_s, connection=connection)
        client.start()
        serving = self._thread.submit(loop.run)
        try:
            yield client
        finally:
            await client.close()
            loop.stop()
            await asyncio.wait([asyncio.wrap_future(serving)])  # its error has ended the requests

    def flush_cache(self) -> None:
        with self._stepping:
            self._thread.submit(self.scheduler.blocks.flush_cache).result()

    def status(self) -> ReplicaStatus:
        loop = StepLoop(self.scheduler, self._ranks, InMemoryMailbox(), self.config.model.name)
        with self._stepping:
            return self._thread.submit(loop.status).result()

    def control(self, command: EngineCommand) -> None:
        mailbox = InMemoryMailbox()
        loop = self._loop(mailbox)
        outcomes: list[EngineControlled] = []

        def on_message(message: ReplicaMessage) -> None:
            if isinstance(message, EngineControlled):
                outcomes.append(message)
                loop.stop()

        mailbox.connect(_GATEWAY, on_message)
        mailbox.post(_GATEWAY, ControlEngine(_QUERY_ID, command))
        with self._stepping:
            self._thread.submit(loop.run).result()
        if outcomes[0].error:
            raise InvalidRequest("command", outcomes[0].error)

    def _loop(self, mailbox: InMemoryMailbox) -> StepLoop:
        return StepLoop(self.scheduler, self._ranks, mailbox, self.config.model.name, events=self._events)

    def _serve(self, batch: _Batch, loop: StepLoop) -> None:
        with self._stepping:
            batch.submit()
            loop.run()

    def close(self) -> None:
        with suppress(QuireError, RuntimeError):  # the interpreter is ending, which has ended the thread
            self._settle(_WRITE_TIMEOUT_S)
        self._thread.shutdown()
        if self._events is not None:
            self._events.close()
        self._group.close()
        self._open.close()


def _publisher(config: EngineConfig) -> EventSink | None:
    """Return the publisher of KV events, if the options ask for one; without, ZeroMQ is not needed."""
    if config.cache.kv_events is None:
        return None
    from ...scheduler import open_sink

    return open_sink(config.cache, time.time())


class _Batch:
    """The requests of one `InProcessEngine.run`, as a gateway of the step loop.

    No caller sees a part of an output, so the tokens of several steps are processed together, at the end of a
    sequence. Requests with stop strings are processed in every step, since the scheduler must end them.

    Attributes:
        error: first error that ended a request, or that its output raised.
    """

    def __init__(
        self,
        collectors: list[OutputCollector],
        advance: Callable[[], None],
        mailbox: InMemoryMailbox,
        loop: StepLoop,
    ) -> None:
        self.error: Exception | None = None
        self._collectors = collectors
        self._advance = advance
        self._mailbox = mailbox
        self._loop = loop
        self._running: dict[int, tuple[OutputCollector, int]] = {}  # handle |-> collector and output index
        self._unread: list[TokenBatch] = []
        self._max_unread = 1 if any(each.finds_stops for each in collectors) else _MAX_UNREAD
        self._has_ended = False
        mailbox.connect(_GATEWAY, self._on_message)

    def submit(self) -> None:
        """Post all requests."""
        for collector in self._collectors:
            first = len(self._running)
            for index in range(collector.request.sampling.num_sequences):
                self._running[first + index] = collector, index
            self._mailbox.post(_GATEWAY, collector.request.submit_message(first))
        if not self._running:
            self.end()

    def end(self) -> None:
        """End the step loop, which aborts what still runs; later output is ignored. From any thread."""
        self._has_ended = True
        self._loop.stop()

    def _on_message(self, message: ReplicaMessage) -> None:
        if isinstance(message, MediaWanted):
            self._send_images(message)
        if self._has_ended or not isinstance(message, TokenBatch):
            return
        self._unread.append(message)
        if not message.finished and len(self._unread) < self._max_unread:
            return
        unread, self._unread = self._unread, []
        try:
            for handle, update in updates_by_handle(*unread):
                self._on_update(handle, update)
        except Exception as error:
            self.error = error
        if self.error is not None or not self._running:
            self.end()

    def _send_images(self, wanted: MediaWanted) -> None:
        """Post the images that a sequence waits for."""
        collector, _ = self._running.get(wanted.handle, (None, 0))
        if collector is not None:
            tensors = collector.request.media_tensors
            for upload in chain.from_iterable(media_uploads(each, tensors[each]) for each in wanted.digests):
                self._mailbox.post(_GATEWAY, upload)

    def _on_update(self, handle: int, update: SequenceUpdate) -> None:
        collector, index = self._running[handle]
        collector.on_update(index, update)
        if update.finish is not None:
            del self._running[handle]
            if collector.processor.is_finished:
                self._advance()
        elif collector.processor.has_stop_string(index):  # at a stop string
            self._mailbox.post(_GATEWAY, Stop(handle))
