"""WorkerActor: one tensor-parallel rank as a process of its own, made a Ray actor by the cluster.

Ray starts it and watches it; plans and results travel over the step channel. It wants two concurrent calls:
`run` occupies one for the rank's whole life, and the other answers `where` meanwhile.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from ..proto.config import EngineConfig
from ..proto.errors import RankFailed, in_one_line
from ..proto.step import StepFailure, StepPlan, StepResult
from ..proto.stream import RankStatus
from ..proto.transport.channel import ChannelAddress, StepReceiver

if TYPE_CHECKING:
    from .comm.communicator import Communicator
    from .runner import ModelRunner

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank says once its weights are in place.

    Attributes:
        num_blocks: KV blocks that its memory holds.
        seconds: by stage: ``import``, ``join``, ``weights``, ``profile``.
    """

    status: RankStatus
    num_blocks: int
    seconds: dict[str, float]


class WorkerActor:
    """One rank: joins its group, loads its shard, executes plans until told to end."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._device = config.parallel.device
        self._stage = "start"
        self._seconds: dict[str, float] = {}
        self._runner: ModelRunner | None = None
        self._bytes_read = 0, 0
        # Imported here, so that a driver, which only names this class, does not load torch.
        with self._timed("import"):
            import torch

            from . import runner
            from .comm import communicator as parallel
            from .comm import shared_memory
        self._parallel, self._runner_module, self._join_group = parallel, runner, shared_memory.join
        if self._device == "cuda":
            ordinal = _assigned_gpu()
            torch.cuda.set_device(ordinal)
            self._device = f"cuda:{ordinal}"
        else:
            # Ray sets OMP_NUM_THREADS to 1.
            torch.set_num_threads(config.parallel.threads_per_rank)

    def open_store(self, one_host: bool) -> tuple[str, int]:
        """Opens the store at which the ranks meet, on rank 0 only.

        Args:
            one_host: every rank is on this host, so loopback will do.

        Returns:
            Its host and port.
        """
        host = _LOOPBACK if one_host else str(ray.util.get_node_ip_address())
        self._store, port = self._parallel.open_store(host)
        return host, port

    def load(self, store: tuple[str, int] | None) -> LoadReport:
        """Joins the group at rank 0's store (None: this is the only rank) and loads the weights.

        Raises:
            ModelLoadError: the model directory cannot be read.
        """
        with self._timed("join"):
            comm = self._parallel.SingleRank() if store is None else self._join(*store)
        with self._timed("weights"):
            self._runner = self._runner_module.ModelRunner(self._config, comm, self._note_read)
        with self._timed("profile"):
            num_blocks = self._runner.num_blocks_that_fit()
        return LoadReport(self.where(), num_blocks, dict(self._seconds))

    def bytes_read(self) -> tuple[int, int]:
        """Bytes of its weights that the rank has read, and those that it will read in all."""
        return self._bytes_read

    def allocate(self, num_blocks: int) -> float:
        """Allocates the KV cache: the same number of blocks on every rank. Returns blocks/s to host memory."""
        assert self._runner is not None
        return self._runner.allocate_cache(num_blocks)

    def run(self, address: ChannelAddress) -> None:
        """Executes the channel's plans until the sender ends.

        A step that fails is answered with a StepFailure, and the rank ends: leaving the group fails the
        collective that the other ranks may wait in.
        """
        assert self._runner is not None
        receiver = StepReceiver(address, self._rank)
        try:
            answered_at = time.perf_counter()
            while (frame := receiver.receive()) is not None:
                waited_s = time.perf_counter() - answered_at
                reply = self._reply_to(frame, self._runner)
                if isinstance(reply, StepResult):
                    reply.stage_times["wait"] = waited_s
                receiver.reply(reply.encode())
                if isinstance(reply, StepFailure):
                    return
                if (failure := self._finish(reply, self._runner)) is not None:
                    receiver.reply(failure.encode())
                    return
                answered_at = time.perf_counter()
        finally:
            receiver.close()
            self._runner.close()
            self._stage = "ended"

    def where(self) -> RankStatus:
        """Who this is and what it is doing."""
        stage = self._stage if self._runner is None or self._stage == "ended" else self._runner.stage
        return RankStatus(self._rank, os.getpid(), socket.gethostname(), self._device, stage)

    def _reply_to(self, frame: bytes, runner: ModelRunner) -> StepResult | StepFailure:
        step_id = epoch = 0
        try:
            plan = StepPlan.decode(frame)
            step_id, epoch = plan.step_id, plan.epoch
            return runner.execute(plan)
        except RankFailed as error:
            return StepFailure(step_id, epoch, self._rank, error.stage or runner.stage, error.reason)
        except Exception as error:
            return StepFailure(step_id, epoch, self._rank, runner.stage, in_one_line(error))

    def _finish(self, result: StepResult, runner: ModelRunner) -> StepFailure | None:
        """What the runner does after the answer; its failure is that of the step to come."""
        try:
            runner.after_step()
        except Exception as error:
            return StepFailure(result.step_id + 1, result.epoch, self._rank, runner.stage, in_one_line(error))
        return None

    def _note_read(self, num_read: int, num_expected: int) -> None:
        self._bytes_read = num_read, num_expected

    def _join(self, host: str, port: int) -> Communicator:
        parallel = self._config.parallel
        return self._join_group(
            self._rank,
            parallel.tensor_parallel_size,
            host,
            port,
            _BACKENDS[parallel.device],
            self._config.scheduler.step_timeout_s,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self._stage = stage
        started = time.monotonic()
        yield
        self._seconds[stage] = time.monotonic() - started


def _assigned_gpu() -> int:
    """The device ordinal of the GPU that Ray assigned, which is an id as CUDA_VISIBLE_DEVICES counts them."""
    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(assigned) if visible else int(assigned)
