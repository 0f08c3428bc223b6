"""ModelRunner: the execution of steps on one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.dispatch import forget_failed_compilation, is_compiling, num_compilations
from ...kernels.native.instruction_sets import instruction_set
from ...kernels.native.memory import keep_freed_memory
from ...proto.block_tables import IntArray, add_digests
from ...proto.config import EngineConfig, SwapRates
from ...proto.engine_command import ALL_TAGS, EngineCommand
from ...proto.errors import ConfigError, RankFailed, in_one_line
from ...proto.kv_layout import layout_of
from ...proto.options.sections import NIXL
from ...proto.replica_status import COMPILE_STAGE
from ...proto.step import EncoderInput, StepPlan, StepResult
from ...proto.stored_kv import StoredReport
from ..comm.communicator import Communicator
from ..comm.pipeline import Pipeline
from ..graphs.graphs import GraphBackend
from ..libraries.attention_backend import log_attention
from ..libraries.recurrence_backend import log_recurrence
from ..memory.cache_engine import state_layouts
from ..memory.host_to_device import to_device
from ..memory.shared_segment import SegmentAddress
from ..step.batch import gather_batch
from ..transfer.kv_blocks import KvBlocks, NoKvService
from ..transfer.nixl import check_nixl_is_installed
from ..weights.checkpoint import ProgressCallback
from ..weights.weight_source import WeightOrigin
from .device import compute_device, on_device
from .lost_device import step_failed
from .rank_memory import RankMemory
from .step_executor import IDLE, LaunchedStep, StepStages
from .warm_up import warm_up_plans

if TYPE_CHECKING:
    from ...proto.transport.network import CurveKeys
    from ..transfer.service import KvService

_log = logging.getLogger(__name__)

# Freed memory that a CPU process keeps for the next step: activations of thousands of tokens.
KEPT_BYTES = 512 << 20


class ModelRunner:
    """Executes plans on one rank.

    Args:
        config: resolved; its tensor_parallel_size equals comm.size.
        comm: the tensor-parallel group.
        pipeline: the groups of this rank; None if `comm` has all ranks.
        on_progress: called with the bytes read and the total while weights load.
        graph_backend: records steps; None for CUDA graphs on a GPU and no graphs on a CPU.
        device: of the weights and the KV cache; None for the thread's current one. It must be the current device of
            every thread that calls a method (see `on_device`).
        inherited: segments with the weights of the rank that this one replaces, see `weight_segments`, other
            replicas' ranks that have the weights of this one, or nodes with copies of the files.

    Attributes:
        device: of the weights and the KV cache.
        memory: the weights, the KV cache and the rows.
        prepare_seconds: of the last preparation on a GPU: to record ``graphs``, and to ``warm up``.

    Raises:
        ConfigError: the model or its tensor_parallel_size is not supported, the weights do not fit into memory,
            QUIRE_CPU_ISA names an instruction set that the processor lacks, or NIXL is chosen and not installed.
        ModelLoadError: the weights cannot be read.
    """

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        on_progress: ProgressCallback | None = None,
        graph_backend: GraphBackend | None = None,
        device: torch.device | None = None,
        inherited: Sequence[WeightOrigin] = (),
        pipeline: Pipeline | None = None,
    ) -> None:
        if config.cache.kv_transport == NIXL:
            check_nixl_is_installed()
        self._stages = StepStages()
        self._config = config
        self._pipeline = Pipeline.of_one_stage(comm) if pipeline is None else pipeline
        self.device = compute_device(config.parallel.device) if device is None else device
        if self.device.type == "cpu":
            torch.set_num_threads(config.parallel.threads_per_rank)
            _check_instruction_set()
        self.memory = RankMemory(
            config, self._pipeline, self.device, self._stages, graph_backend, inherited, on_progress
        )
        if self.device.type == "cpu":
            keep_freed_memory(KEPT_BYTES)
        self._kv_address: tuple[str, CurveKeys | None] | None = None
        self._kv: KvService | NoKvService = NoKvService()
        self._is_closed = False
        self._num_compilations = 0  # when the rank was ready
        self.prepare_seconds: dict[str, float] = {}

    @property
    def stage(self) -> str:
        """Return the stage of the step, and what another pipeline stage is awaited for.

        The former is ``idle``, ``apply``, ``encode``, ``draft``, ``forward`` or ``sample``.

        Outside of steps it is ``command`` or ``record``. It is ``compile`` while a kernel variant is compiled in any
        other stage, which no step is expected to do.
        """
        if is_compiling():
            return COMPILE_STAGE
        awaited = self._pipeline.link.awaited
        return f"{self._stages.stage}, awaits {awaited}" if awaited else self._stages.stage

    @property
    def weight_segments(self) -> tuple[SegmentAddress, ...]:
        """Return the segments that hold the weights, open in this process; none if they are in memory of its own."""
        return self.memory.loader.standby.addresses

    @property
    def kv_segment(self) -> SegmentAddress | None:
        """Return the segment that holds the KV cache, the same one as long as the runner lives, or None."""
        return self.memory.kv.segment

    def num_blocks_that_fit(self) -> int:
        """Return the number of KV blocks that fit into this rank's memory, including the scratch block."""
        return self.memory.num_blocks_that_fit()

    def allocate_cache(
        self, num_blocks: int, *, touches_pages: bool = True, inherited: SegmentAddress | None = None
    ) -> SwapRates:
        """Allocate the KV cache on the device and the host; called once, before the first step.

        Args:
            touches_pages, inherited: as for KvMemory.allocate; see `kv_segment`.

        Returns:
            what swaps move between the two; nothing with inherited memory.

        Raises:
            ConfigError: there is not enough memory, or the model fails its self-check.
        """
        memory = self.memory
        is_inherited = memory.allocate_kv(num_blocks, touches_pages=touches_pages, inherited=inherited)
        self._prepare()
        return (
            SwapRates() if is_inherited else memory.kv.cache.measure_swap_rates()
        )  # which writes host blocks

    def reset(self, *, has_new_ranks: bool) -> None:
        """Empty all rows after the group was joined anew, and prepare for steps as `allocate_cache` does.

        The weights and the memory of the KV cache stay. A rank that sleeps wakes: new ranks are awake, and a new
        scheduler does not know of the sleep.

        Args:
            has_new_ranks: these launch every kernel, with collectives that all ranks join and, on a GPU, in any
                blocks of the device. Otherwise no block is written.
        """
        self._stages.reset()
        forget_failed_compilation()
        self._kv.close()
        self.memory.wake_for_new_group()
        self._prepare(warms_up=has_new_ranks)
        self._open_transfers()

    def serve_blocks(self, endpoint: str, keys: CurveKeys | None) -> None:
        """Let blocks travel, if the configuration says so, until `end_serving`.

        Args:
            endpoint, keys: where readers connect; see ZmqTransport.
        """
        config = self._config
        is_whole = config.parallel.num_kv_partitions == config.parallel.pipeline_parallel_size == 1
        if config.cache.moves_kv and is_whole:
            self._kv_address = endpoint, keys
            self._open_transfers()

    def end_serving(self) -> None:
        """Let no block travel any more; when this returns, no thread uses the blocks. Safe to call twice."""
        self._kv_address = None
        self._kv.close()

    def _open_transfers(self) -> None:
        memory = self.memory
        if self._kv_address is None or memory.parts != ALL_TAGS:
            return
        from ..transfer.service import (
            open_service,
        )  # ZeroMQ, which a rank in one process with its scheduler lacks

        weights = f"{memory.loaded.digest & (1 << 64) - 1:016x}"
        states = state_layouts(self._config)
        layout = layout_of(self._config, self._pipeline.tensor.rank, weights, states=states)
        if states:  # schedulers compare the weights' names, and do not know the tensors of states
            weights = f"{weights}-{layout.whole.fingerprint.hex()}"
        blocks = KvBlocks(memory.kv.cache, self._config.cache_layout, layout, self.device)
        self._kv = open_service(
            blocks,
            weights,
            *self._kv_address,
            run=self._run_on_device,
            has_nixl=self._config.cache.kv_transport == NIXL,
        )

    def _run_on_device(self, body: Callable[[], None]) -> None:
        with on_device(self.device):
            body()

    def take_media(self, image: EncoderInput) -> None:
        """Keep the tensors of an image until the plan that has it encoded."""
        self.memory.encoder_outputs.take(image)

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch one step and wait for its tokens; see `launch`."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch one step; on a CPU execute it. Plans must be launched in the order in which the scheduler made them.

        On a GPU the host does not wait for the device, so that it can launch the next step meanwhile: rows append
        their sampled tokens on the device. Prompt log-probabilities are an exception, for which it waits.

        Raises:
            RankFailed: the plan does not match this rank's state (raised before any collective), a collective failed,
                or any other error occurred; the rank cannot execute further steps before `reset`, or ever if it is
                no step error.
        """
        stages, memory = self._stages, self.memory
        result = StepResult(plan.step_id, plan.epoch, self._pipeline.rank, stage_times=stages.begin_step())
        try:
            if plan.command is not None:
                memory.relay.begin_plan(plan)
                memory.rows.unsettled.settle()
                result.command_error = self._carry_out(plan.command)
                return LaunchedStep(result)
            stages.begin("apply")
            memory.relay.begin_plan(plan)
            if plan.kv is not None:
                memory.kv.cache.wait_for_swaps()  # those that fill what is lent from now on
            self._kv.apply(plan.kv)
            self._apply(plan)
            if plan.kv is not None:
                memory.kv.cache.wait_for_swaps()  # those that save what pulls overwrite
            self._kv.apply_pulls(plan.kv)
            memory.relay.complete(plan)
            stages.exclude(self._pipeline.link.take_waited_s())
            memory.rows.unsettled.settle_older()
            num_drafted = self._draft(plan)
            if memory.attention.reads_lens or memory.loaded.model.gathers_keys:
                memory.rows.unsettled.settle()  # the lengths are needed on the host
            batch = gather_batch(memory.rows, plan, self._config.cache.block_size, num_drafted)
            stages.begin(IDLE)
            result.lora_reports = memory.loaded.adapters.take_reports(is_idle=batch is None)
            result.kv_reports = self._kv.take_reports(is_idle=batch is None)
            result.stored_reports = self._take_stored_reports(is_idle=batch is None)
            step = LaunchedStep(result) if batch is None else memory.executor.launch(batch, result)
            saves = plan.state_saves
            if plan.save_tails.size:
                saves = saves[plan.save_tails == 0]  # the step has saved the others
            if len(saves):
                memory.kv.cache.copy_states(to_device(saves, self.device, torch.int64))
            memory.balancer.after_step()
            result.stage_times.update(self._pipeline.take_collective_s())
            # None is expected.
            result.num_compilations = num_compilations() - self._num_compilations
            return step
        except RankFailed:
            raise
        except Exception as error:
            raise self._failure(plan, in_one_line(error)) from error

    def drop_graphs(self) -> None:
        """Drop the recorded steps, whose collectives are those of the present group; any thread may call it."""
        self.memory.drop_graphs()

    def close(self) -> None:
        """Leave the group, and free the weights, the KV cache and the graphs. Safe to call twice."""
        self.end_serving()
        self._pipeline.close(self.drop_graphs)
        if not self._is_closed:
            self._is_closed = True
            self.memory.close()

    def _apply(self, plan: StepPlan) -> None:
        rows, kv = self.memory.rows, self.memory.kv
        self.memory.loaded.adapters.apply(plan)
        rows.apply(plan)
        if plan.released_rows.size:
            self.memory.loaded.drafts.forget(plan.released_rows)
        outputs = self.memory.encoder_outputs
        digest = add_digests(rows.tables.digest, outputs.digest_after(plan))
        if digest != plan.digest:
            reason = (
                f"its block tables and encoder outputs have digest {digest:016x}, the scheduler's "
                f"{plan.digest:016x}"
            )
            raise self._failure(plan, reason)
        if plan.encodes.size or plan.media_drops.size:
            self._stages.begin("encode")
            outputs.apply(plan, self.memory.loaded.encoder)
            self._stages.begin("apply")
        if rows.partition is not None:
            plan = rows.partition.own_moves(plan)
        if len(plan.swap_out):
            kv.cache.swap_out(torch.from_numpy(plan.swap_out.astype(np.int64)))
        if len(plan.swap_in):
            kv.cache.swap_in(torch.from_numpy(plan.swap_in.astype(np.int64)))
        if len(plan.copies):
            kv.cache.copy(to_device(plan.copies, self.device, torch.int64))
        if len(plan.state_swap_out):
            kv.cache.swap_out_states(plan.state_swap_out)
        if len(plan.state_swap_in):
            kv.cache.swap_in_states(plan.state_swap_in)
        if len(plan.state_copies):
            kv.cache.copy_states(to_device(plan.state_copies, self.device, torch.int64))
        if plan.stored_orders:
            self.memory.stored.apply(plan, kv.cache.swaps_so_far())

    def _take_stored_reports(self, *, is_idle: bool) -> tuple[StoredReport, ...]:
        """Return the news of stored blocks; ranks with nothing to compute wait for each other, as for adapters."""
        reports = self.memory.stored.take_reports(is_idle=is_idle)
        if is_idle and self._config.kv_directories:
            self._pipeline.replica.barrier()
        return reports

    def _draft(self, plan: StepPlan) -> IntArray | None:
        """Draft tokens as Speculator.draft does."""
        loaded, num_drafted = self.memory.loaded, None
        if plan.draft_rows.size:
            self._stages.begin("draft")
            self.memory.kv.cache.wait_for_swaps()
            num_drafted = loaded.drafts.draft(plan)
            self._stages.begin("apply")
        loaded.tap.begin_step(plan)
        return num_drafted

    def _carry_out(self, command: EngineCommand) -> str:
        self._stages.begin("command")
        self._kv.close()
        error = self.memory.carry_out(command)
        self._prepare()
        self._open_transfers()
        self._stages.reset()
        return error

    def _prepare(self, *, warms_up: bool = True) -> None:
        """Prepare for steps, if everything is in memory, and launch every kernel once.

        The ranks' collectives meet here.
        """
        started = time.perf_counter()
        if not self.memory.prepare():
            return
        if self.device.type != "cpu":
            self.prepare_seconds = {"graphs": time.perf_counter() - started}
        if self.device.type != "cpu" and warms_up:
            self.prepare_seconds["warm up"] = self._warm_up()
            log_attention(self.memory.attention)
            if self._config.model.has_states:
                log_recurrence(self.memory.loader.recurrence)
        self._num_compilations = num_compilations()

    def _warm_up(self) -> float:
        """Launch every kernel variant, so that Triton compiles none while requests run; return the seconds."""
        started, before = time.perf_counter(), num_compilations()
        for plan in warm_up_plans(self._config, self.memory.kv.cache.num_blocks):
            self.launch(plan).result()
        seconds = time.perf_counter() - started
        _log.info("compiled or loaded %d kernel variants in %.2f s", num_compilations() - before, seconds)
        return seconds

    def _failure(self, plan: StepPlan, reason: str) -> RankFailed:
        return step_failed(self._pipeline.rank, reason, plan.step_id, self.stage)


def _check_instruction_set() -> None:
    try:
        instruction_set()
    except ValueError as error:
        raise ConfigError(str(error)) from None
