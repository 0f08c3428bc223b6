"""WorkerActor: the process of one rank; the cluster makes it a Ray actor.

Ray starts and monitors the process; plans and results travel over the step channel. The actor needs a concurrency of
two: `run` occupies one call for the rank's whole life, and `status` is answered by the other. Ray calls the
constructor and the methods on different threads, so each method that uses the device makes it current.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import ray

from ...kernels.native.build import build_library
from ...proto.config import EngineConfig, SwapRates
from ...proto.errors import RankFailed, in_one_line
from ...proto.faults import SIGNALS, Fault, FaultKind
from ...proto.model.parallel_split import ParallelSplit
from ...proto.replica_status import RankStatus
from ...proto.step import EncoderInput, StepFailure, StepPlan, StepResult
from ...proto.transport.channel import ChannelAddress, StepReceiver
from ...proto.transport.network import tcp_endpoint
from ..comm.deadline import ends_within
from ..memory.shared_segment import SegmentAddress
from .device import compute_device, on_device
from .lost_device import loses_device
from .start_log import StartLog, StartRecord

if TYPE_CHECKING:
    import torch

    from ..comm.pipeline import Pipeline
    from ..comm.replica_groups import ReplicaGroups
    from ..weights.weight_source import WeightOrigin, WeightSource
    from .runner import ModelRunner
    from .step_executor import LaunchedStep
    from .weight_peers import WeightServer


class InjectedFault(RuntimeError):
    """The exception of a step that an operator asked for."""


class StepFaults:
    """Faults that wait for a step of this rank. `add` may be called from another thread than `before_step`.

    Args:
        clock: monotonic time in seconds.
        sleep: delays a step.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        # Each with the time of its end. Replaced as a whole: a step reads it without a lock.
        self._active: tuple[tuple[Fault, float], ...] = ()

    def add(self, fault: Fault) -> None:
        """Let a fault begin with the next step."""
        self._active = (*self._active, (fault, self._clock() + fault.duration_s))

    def before_step(self, plan: StepPlan) -> None:
        """Raise or wait as the faults demand; does nothing without faults.

        Raises:
            InjectedFault: by a fault of the kind EXCEPTION or POISON.
        """
        if self._active:
            self._apply(plan)

    def _apply(self, plan: StepPlan) -> None:
        now, faults = self._clock(), self._active
        self._active = tuple(
            (fault, end) for fault, end in faults if fault.kind is not FaultKind.EXCEPTION and now < end
        )
        for fault, _ in faults:
            if fault.kind is FaultKind.EXCEPTION:
                raise InjectedFault("an operator caused this exception")
        for fault, _ in self._active:
            if fault.kind is FaultKind.SLOW:
                self._sleep(fault.delay_s)
            elif any(fault.token_id in sequence.token_ids for sequence in plan.new):
                raise InjectedFault(f"an operator poisoned token {fault.token_id}")


_LOOPBACK = "127.0.0.1"
# For a rank to leave its group, whose collectives may wait for a rank that has ended.
LEAVE_TIMEOUT_S = 10.0
# Least deadline of joining a group and of each collective. The scheduler finds a hung rank much earlier.
MIN_COLLECTIVE_TIMEOUT_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process.

    Attributes:
        host: host name.
        stderr: path of the file that its standard error goes to, on that host; empty if it is no file.
        raylet_pid: of its parent, the manager of its Ray node; 0 if unknown.
        is_loaded: it has the weights and the KV cache of its rank, so that it can `rejoin`.
    """

    pid: int
    host: str
    stderr: str = ""
    raylet_pid: int = 0
    is_loaded: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a rank that has loaded its weights.

    Attributes:
        seconds: by stage: ``import``, ``join``, ``weights``, and ``compile``, for kernels that are compiled beside
            these and not ready yet.
    """

    status: RankStatus
    seconds: dict[str, float]


def build_ops(config: EngineConfig) -> None:
    """Compile the C++ ops if the ranks compute on CPUs and this host lacks them."""
    if config.parallel.device == "cpu":
        build_library()


class WorkerActor:
    """One rank: joins its group, loads its shard, and executes plans until the channel closes.

    Args:
        rank: None for a standby, which becomes a rank by `take_place`.
        make_runner: makes what computes the steps, from the arguments of `ModelRunner`; None for that.
    """

    def __init__(
        self, config: EngineConfig, rank: int | None, make_runner: Callable[..., Any] | None = None
    ) -> None:
        self._config = config
        self._assigned_rank = rank
        self._stage = "start"
        self._seconds: dict[str, float] = {}
        self._runner: ModelRunner | None = None
        self._groups: ReplicaGroups | None = None  # None for a single rank
        self._receiver: StepReceiver | None = None
        self._bytes_read = 0, 0
        self._is_loaded = False
        self._source_lock = threading.Lock()
        self._weight_server: WeightServer | None = None  # None until a replica asks for the weights
        self._num_runs = 0
        self._has_no_run = threading.Event()
        self._has_no_run.set()
        self._waits_for_device = False  # for the tokens of a launched step
        self._lost_device_by = ""  # the error after which this process can use its GPU no more
        self._faults = StepFaults()
        self._start_log = StartLog()
        # Imported here so that the driver, which only names this class, does not load torch.
        with self._timed("import"):
            import torch

            from ..comm import pipeline, replica_groups, torch_distributed
            from . import runner, start_compilation
        gc.freeze()  # a full collection of all modules takes 0.1 s; models come later and can be freed
        self._create_store, self._groups_class = torch_distributed.create_store, replica_groups.ReplicaGroups
        self._make_runner, self._single_rank = make_runner or runner.ModelRunner, pipeline.SINGLE_RANK
        self._compile_at_start = start_compilation.compile_at_start
        kind = config.parallel.device
        self._device = compute_device(kind, None if kind == "cpu" else _assigned_gpu())
        # Ray sets OMP_NUM_THREADS to 1, or, if the process had imported torch before, to nothing.
        torch.set_num_threads(config.parallel.threads_per_rank)

    def take_place(self, config: EngineConfig, rank: int) -> None:
        """Become a rank in a process that was started as a standby."""
        assert self._assigned_rank is None, f"the process is rank {self._assigned_rank} already"
        self._config, self._assigned_rank = config, rank

    def assigned_rank(self) -> int | None:
        """Return the rank; None for a standby."""
        return self._assigned_rank

    def build_ops(self) -> None:
        """Compile the C++ ops of a CPU if this host lacks them; before `load`, where ranks wait for each other."""
        build_ops(self._config)

    def create_store(self, one_host: bool) -> tuple[str, int]:
        """Create the store for the rendezvous of the ranks; on rank 0 only.

        Args:
            one_host: all ranks are on this host, so the store listens on loopback.

        Returns:
            the store's host and port.
        """
        host = _LOOPBACK if one_host else str(ray.util.get_node_ip_address())
        self._store, port = self._create_store(host)
        return host, port

    def load(self, store: tuple[str, int] | None, inherited: Sequence[WeightOrigin] = ()) -> LoadReport:
        """Join the group and load the weights.

        Args:
            store: host and port of rank 0's store; None if this is the only rank.
            inherited: segments with the weights of the process that this one replaces, other replicas' ranks that
                have the weights of this one, or nodes with copies of the files.

        Raises:
            ModelLoadError: the model directory cannot be read.
        """
        with self._start_log.recording(), on_device(self._device):
            with self._timed("join"):
                own = self._single_rank if store is None else self._join(*store)
            compilation = self._compile_at_start(self._config, self._device)
            with self._timed("weights"):
                self._runner = self._make_runner(
                    self._config,
                    own.tensor,
                    self._on_progress,
                    device=self._device,
                    inherited=inherited,
                    pipeline=own,
                )
            with self._timed("compile"):
                compilation.wait()
        return LoadReport(self.status(), dict(self._seconds))

    def weight_segments(self) -> tuple[SegmentAddress, ...]:
        """Return the segments that hold the weights in use; see ModelRunner."""
        return self._loaded.weight_segments

    def weight_source(self, replica_id: str, *, over_network: bool) -> WeightSource:
        """Return where the rank of this number of another replica can read the weights in use.

        Args:
            replica_id: of this replica, for messages.
            over_network: other hosts may read, through a port that is open from now on.
        """
        host = str(ray.util.get_node_ip_address()) if over_network else None
        return self._serve_weights(replica_id).source(self._loaded.weight_segments, host)

    def copy_sources(self, replica_id: str, num_readers: int) -> tuple[WeightSource, ...] | None:
        """Return where each of some nodes can read this node's copies of model files; None if it makes none.

        Call it before `load`, for nodes that copy at the same time, or later.
        """
        host, node = str(ray.util.get_node_ip_address()), ray.get_runtime_context().get_node_id()
        return self._serve_weights(replica_id).copies(host, node, num_readers)

    def _serve_weights(self, replica_id: str) -> WeightServer:
        with self._source_lock:
            if self._weight_server is None:
                from .weight_peers import WeightServer

                owner = f"rank {self._rank} of {replica_id}"
                self._weight_server = WeightServer(owner, lambda: not self._is_loaded)
        return self._weight_server

    def rejoin(self, store: tuple[str, int] | None, *, has_new_ranks: bool) -> RankStatus:
        """Join a new group with the weights in place and empty rows.

        It joins collectives, as `allocate` does on a new rank. Call it after `run` has returned.

        Args:
            store: see `load`.
            has_new_ranks: ranks were replaced; otherwise the content of the KV blocks stays.
        """
        with on_device(self._device):
            self._stage = "join"
            if self._groups is not None and store is not None:
                self._groups.join_again(*store)
            self._loaded.reset(has_new_ranks=has_new_ranks)
        self._stage = "ready"
        return self.status()

    def leave(self) -> None:
        """End `run`, also while it waits for a plan or in a collective, and wait for its end.

        Ray calls this on another thread, possibly for a scheduler that did not call `run` itself.

        Raises:
            TimeoutError: `run` did not end in LEAVE_TIMEOUT_S.
            RuntimeError: the process can use its GPU no more.
        """
        if self._lost_device_by:
            raise RuntimeError(f"rank {self._rank} must be replaced: {self._lost_device_by}")
        receiver = self._receiver
        if receiver is not None:
            receiver.interrupt()
        # Collectives on a CPU end by themselves when another rank has left or ended; NCCL's do not.
        if self._device.type != "cpu":
            self._leave_group()
        # The end of `run` closes the group; a group that was joined before that would be closed with it.
        if not self._has_no_run.wait(LEAVE_TIMEOUT_S):
            raise TimeoutError(f"rank {self._rank} did not leave its step loop in {LEAVE_TIMEOUT_S:g} s")

    def process(self) -> RankProcess:
        """Return the process of the rank."""
        target = os.readlink("/proc/self/fd/2")
        stderr = target if target.startswith("/") else ""
        return RankProcess(os.getpid(), socket.gethostname(), stderr, os.getppid(), self._is_loaded)

    def cause(self, fault: Fault) -> None:
        """Cause a fault in this rank: does not return if it ends or stops the process."""
        _log.warning("rank %d: an operator causes the fault %s", self._rank, fault.kind)
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
        else:
            self._faults.add(fault)

    def profile(self) -> int:
        """Return the number of KV blocks that fit into this rank's memory.

        On a GPU a step is run, whose collectives wait for all ranks: call it when every rank has loaded. Ranks load
        at different speeds, and NCCL's watchdog ends a rank that waits too long.
        """
        with self._start_log.recording(), on_device(self._device), self._timed("profile"):
            return self._loaded.num_blocks_that_fit()

    def bytes_read(self) -> tuple[int, int]:
        """Return the bytes of weights read so far, and the total for this rank."""
        return self._bytes_read

    def allocate(self, num_blocks: int) -> SwapRates:
        """Allocate the KV cache, with the same number of blocks on all ranks; return the rates of swaps."""
        with self._start_log.recording(), on_device(self._device), self._timed("allocate"):
            rates = self._loaded.allocate_cache(num_blocks)
        self._is_loaded = True
        return rates

    def start_seconds(self) -> dict[str, float]:
        """Return the seconds of this rank's start by stage.

        They are those of LoadReport, ``profile`` and ``allocate``, and of the latter the parts that take long on a
        GPU: ``graphs`` and ``warm up``.
        """
        # What `make_runner` makes need not have them.
        return self._seconds | getattr(self._loaded, "prepare_seconds", {})

    def take_start_log(self) -> tuple[StartRecord, ...]:
        """Return what this rank has logged while it loaded, profiled and allocated; empty from the second call on."""
        return self._start_log.take()

    def allocate_again(
        self, num_blocks: int, inherited: SegmentAddress | None = None
    ) -> SegmentAddress | None:
        """Allocate the KV cache in place of a rank that failed, whose memory was enough, as fast as possible.

        Requests wait: on two busy cores writing 512 MB for the first time takes 0.4 to 5 s.

        Args:
            inherited: memory of that rank, whose content stays.

        Returns:
            the segment that holds the KV cache; see ModelRunner.
        """
        with on_device(self._device):
            self._loaded.allocate_cache(num_blocks, touches_pages=False, inherited=inherited)
        self._is_loaded = True
        return self._loaded.kv_segment

    def kv_segment(self) -> SegmentAddress | None:
        """Return the segment that holds the KV cache; see ModelRunner."""
        return self._loaded.kv_segment

    def run(self, address: ChannelAddress) -> None:
        """Execute the channel's plans until the sender closes it.

        The rank replies to a failed step with a StepFailure, leaves the group, which fails the collective that the
        other ranks may wait in, and returns. Its weights stay, for `rejoin`, unless the failure ends the rank.
        """
        self._has_no_run.clear()
        try:
            with on_device(self._device):
                self._run(address)
        finally:
            self._has_no_run.set()

    def status(self) -> RankStatus:
        """Return the process, device and current stage of the rank. Does not use the device, which may hang."""
        stage = self._stage if self._runner is None or self._stage == "ended" else self._runner.stage
        if stage == "idle" and self._waits_for_device:
            stage = "device"
        return RankStatus(self._rank, os.getpid(), socket.gethostname(), str(self._device), stage)

    def _run(self, address: ChannelAddress) -> None:
        receiver = self._receiver = StepReceiver(address, self._rank)
        self._num_runs += 1
        serve = self._serve if self._device.type == "cpu" else self._serve_ahead
        try:
            self._loaded.serve_blocks(self._kv_endpoint(address), address.keys)
            serve(receiver, self._loaded)
        finally:
            self._receiver = None
            self._loaded.end_serving()
            receiver.close()
            self._leave_group()
            self._stage = "ended"

    def _kv_endpoint(self, address: ChannelAddress) -> str:
        """Return where this rank's blocks are read: beside the channel, or at a port that the system chooses."""
        if address.keys is not None:
            return tcp_endpoint(str(ray.util.get_node_ip_address()))
        directory = os.path.dirname(address.plans.removeprefix("ipc://"))
        return f"ipc://{directory}/{os.getpid()}-{self._num_runs}.kv"

    def _serve(self, receiver: StepReceiver, runner: ModelRunner) -> None:
        """Execute each plan and reply, until the channel closes or a step fails."""
        replied_at = time.perf_counter()
        while (frame := self._next_plan(receiver, runner)) is not None:
            waited_s = time.perf_counter() - replied_at
            reply = self._finish(self._launch(frame, runner))
            if isinstance(reply, StepResult):
                reply.stage_times["wait"] = waited_s
            receiver.reply(reply.encode())
            if isinstance(reply, StepFailure):
                return
            replied_at = time.perf_counter()

    def _next_plan(self, receiver: StepReceiver, runner: ModelRunner) -> bytes | None:
        """Return the frame of the next plan, after the images that come before it; None if the channel has closed."""
        while (frame := receiver.receive()) is not None and EncoderInput.is_frame(frame):
            runner.take_media(EncoderInput.decode(frame))
        return frame

    def _serve_ahead(self, receiver: StepReceiver, runner: ModelRunner) -> None:
        """As `_serve`, but launch each plan when it arrives; a thread waits for the device and replies."""
        steps: SimpleQueue[LaunchedStep | StepFailure | None] = SimpleQueue()
        replies = _Replies(receiver, steps, self._finish, self._device)
        num_launched = 0
        while not replies.has_ended:
            waits_since = time.perf_counter()
            if (frame := self._next_plan(receiver, runner)) is None:
                break
            # While the device computes another step, the wait costs nothing.
            is_idle = replies.num_sent == num_launched
            waited_s = time.perf_counter() - waits_since if is_idle else 0.0
            step = self._launch(frame, runner)
            if not isinstance(step, StepFailure):
                step.launched.stage_times["wait"] = waited_s
            steps.put(step)
            num_launched += 1
            if isinstance(step, StepFailure):
                break
        steps.put(None)
        replies.join(max(self._config.scheduler.step_timeout_s, MIN_COLLECTIVE_TIMEOUT_S))

    def _leave_group(self) -> None:
        """Leave the group within LEAVE_TIMEOUT_S: kernels of a collective may wait forever for a rank that ended."""
        groups = self._groups
        if groups is None:
            return

        def leave() -> None:
            with on_device(self._device):
                groups.pipeline.close(self._drop_graphs)

        if not ends_within(LEAVE_TIMEOUT_S, leave):
            _log.warning("rank %d: the group was not left in %g s", self._rank, LEAVE_TIMEOUT_S)

    def _drop_graphs(self) -> None:
        if self._runner is not None:
            self._runner.drop_graphs()

    def _launch(self, frame: bytes, runner: ModelRunner) -> LaunchedStep | StepFailure:
        step_id = epoch = 0
        try:
            plan = StepPlan.decode(frame)
            step_id, epoch = plan.step_id, plan.epoch
            self._faults.before_step(plan)
            return runner.launch(plan)
        except RankFailed as error:
            return self._failure(step_id, epoch, error.stage or runner.stage, error.problem)
        except Exception as error:
            return self._failure(step_id, epoch, runner.stage, in_one_line(error))

    def _finish(self, step: LaunchedStep | StepFailure) -> StepResult | StepFailure:
        """Wait for the tokens of a step."""
        if isinstance(step, StepFailure):
            return step
        self._waits_for_device = True
        try:
            return step.result()
        except RankFailed as error:
            launched = step.launched
            return self._failure(launched.step_id, launched.epoch, error.stage or "device", error.problem)
        finally:
            self._waits_for_device = False

    def _failure(self, step_id: int, epoch: int, stage: str, problem: str) -> StepFailure:
        if loses_device(problem):
            self._lost_device_by = problem
        return StepFailure(step_id, epoch, self._rank, stage, problem, ends_rank=bool(self._lost_device_by))

    @property
    def _loaded(self) -> ModelRunner:
        assert self._runner is not None, "the rank has not loaded"
        return self._runner

    @property
    def _rank(self) -> int:
        assert self._assigned_rank is not None, "a standby has no rank yet"
        return self._assigned_rank

    def _on_progress(self, num_read: int, num_expected: int) -> None:
        self._bytes_read = num_read, num_expected

    def _join(self, host: str, port: int) -> Pipeline:
        timeout_s = max(self._config.scheduler.step_timeout_s, MIN_COLLECTIVE_TIMEOUT_S)
        parallel = self._config.parallel
        groups = self._groups_class(ParallelSplit.of(parallel), self._rank, self._device, timeout_s)
        own = groups.join(host, port, replaceable=not parallel.fused_all_reduce)
        if not parallel.fused_all_reduce:  # its peers' memory is part of the model
            self._groups = groups
        return own

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self._stage = stage
        started = time.monotonic()
        yield
        self._seconds[stage] = time.monotonic() - started


class _Replies(threading.Thread):
    """Replies to launched steps in their order, until None or a failure.

    Args:
        finish: waits for the tokens of a step.

    Attributes:
        num_sent: replies so far.
        has_ended: no further reply will be sent.
    """

    def __init__(
        self,
        receiver: StepReceiver,
        steps: SimpleQueue[LaunchedStep | StepFailure | None],
        finish: Callable[[LaunchedStep | StepFailure], StepResult | StepFailure],
        device: torch.device,
    ) -> None:
        super().__init__(name="replies", daemon=True)
        self.num_sent = 0
        self.has_ended = False
        self._receiver, self._steps, self._finish_step, self._device = receiver, steps, finish, device
        self.start()

    def run(self) -> None:
        try:
            with on_device(self._device):
                while (step := self._steps.get()) is not None:
                    reply = self._finish_step(step)
                    self._receiver.reply(reply.encode())
                    self.num_sent += 1
                    if isinstance(reply, StepFailure):
                        return
        finally:
            self.has_ended = True


def _assigned_gpu() -> int:
    """Return the device ordinal of the GPU that Ray assigned by its id in CUDA_VISIBLE_DEVICES."""
    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(assigned) if visible else int(assigned)
