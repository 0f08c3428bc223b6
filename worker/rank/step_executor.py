"""StepExecutor: launches the forward pass and the sampling of one gathered step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray, runs_of
from ...proto.config import EngineConfig
from ...proto.errors import in_one_line
from ...proto.model.parallel_split import Stage
from ...proto.step import Logprobs, StepResult
from ..attention import SplitRule, with_splits, with_states
from ..graphs.graphs import NoGraphs, StepGraphs
from ..libraries.attention_backend import AttentionBackend
from ..lora.step_adapters import NO_ADAPTERS, make_groups
from ..memory.cache_engine import CacheEngine
from ..memory.device_to_host import HostCopy
from ..memory.host_to_device import to_device, to_device_once, to_device_together
from ..models.output_tokens import OutputTokens, select_output_tokens
from ..pooling.pooler import LaunchedVectors
from ..sampling.prompt_logprobs import compute_prompt_logprobs
from ..sampling.sampler import SampledLogprobs, Sampler
from ..speculation.verification import verdict_of, verify, verify_on_device
from ..step.batch import Batch
from ..step.device_rows import DeviceRows
from ..step.token_relay import TokenRelay
from .encoder_outputs import EncoderOutputs
from .loaded_model import LoadedModel
from .lost_device import step_failed

IDLE = "idle"


class StepStages:
    """The present stage of a rank's steps.

    Attributes:
        stage: ``idle`` between steps. Other threads may read it. After a failure it keeps the stage that failed.
        times: seconds of the stages of the present step, in the result's own dictionary; on a GPU the time to launch
            them, except where the host waits.
    """

    def __init__(self) -> None:
        self.stage = IDLE
        self.times: dict[str, float] = {}
        self._began_at = 0.0

    def begin_step(self) -> dict[str, float]:
        """Return the dictionary that gets the times of the next step's stages."""
        self.times = {}
        return self.times

    def begin(self, stage: str) -> None:
        """End the present stage, and begin another one; ``idle`` counts no time."""
        now = time.perf_counter()
        if self.stage != IDLE:
            self.times[self.stage] = self.times.get(self.stage, 0.0) + now - self._began_at
        self.stage, self._began_at = stage, now

    def exclude(self, seconds: float) -> None:
        """Count a part of the present stage as ``await``: waits for other pipeline stages."""
        if seconds:
            self.times["await"] = self.times.get("await", 0.0) + seconds
            self._began_at += seconds

    def reset(self) -> None:
        """Be idle, after a failure too."""
        self.stage = IDLE


@dataclass(slots=True)
class LaunchedStep:
    """A launched step of one rank; it is filled in while it is launched.

    Attributes:
        launched: the result, without what the device has still to compute.
        copied: the token ids, and the four tensors of log-probabilities if there are any; None if no row samples, and
            on ranks other than 0.
        verified_rows: [N], the row of each sample of which the device tells whether it counts; `copied` begins with
            this verdict, [N] bool. None if all samples count.
        logprobs: of the sampled tokens.
        vectors: of the pooled rows whose prompts are complete; None if there are none, and on ranks other than 0.
    """

    launched: StepResult
    copied: HostCopy | None = None
    verified_rows: RowArray | None = None
    logprobs: SampledLogprobs | None = None
    vectors: LaunchedVectors | None = None

    def result(self) -> StepResult:
        """Wait until the device has computed the tokens, and return them. On a CPU they are there already.

        Raises:
            RankFailed: a kernel failed.
        """
        result = self.launched
        try:
            if self.vectors is not None:
                result.pooled = self.vectors.wait()
            if self.copied is None:
                return result
            arrays = self.copied.wait()
        except RuntimeError as error:
            raise step_failed(result.rank, in_one_line(error), result.step_id, "device") from error
        verdict = None if self.verified_rows is None else verdict_of(self.verified_rows, arrays.pop(0))
        result.token_ids, *columns = arrays
        if self.logprobs is not None:
            result.logprobs = Logprobs(self.logprobs.index, *columns)
        if verdict is not None:
            result.token_ids = result.token_ids[verdict.retained]
            result.token_counts, result.num_drafted = verdict.token_counts, verdict.num_drafted
            result.logprobs = None if result.logprobs is None else result.logprobs.select(verdict.retained)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecutor:
    """Everything that computes a step, from its batch to its tokens.

    Attributes:
        rank: tensor-parallel rank; rank 0 of the last stage alone copies tokens to the host.
        stage: the layers of this rank; the last stage samples.
        relay: brings sampled tokens to the first stage.
        waited_s: as StageLink.take_waited_s.
        graphs: recorded steps; others are launched kernel by kernel.
        stages: those of the rank's steps.
        attention: what computes the attention of steps that are not replayed.
        encoder_outputs: the embeddings of images.
    """

    config: EngineConfig
    rank: int
    stage: Stage
    relay: TokenRelay
    waited_s: Callable[[], float]
    device: torch.device
    loaded: LoadedModel
    cache: CacheEngine
    graphs: StepGraphs | NoGraphs
    rows: DeviceRows
    sampler: Sampler
    stages: StepStages
    attention: AttentionBackend
    encoder_outputs: EncoderOutputs

    def launch(self, batch: Batch, result: StepResult) -> LaunchedStep:
        """Launch a step, whose result is `result` when the device has computed it."""
        step, adapters = LaunchedStep(result), self.loaded.adapters
        self.stages.begin("forward")
        self.cache.wait_for_swaps()
        adapters.begin_step(batch.lora)
        replay = self.graphs.replay(batch)
        logits = self._forward(batch, step) if replay is None else replay.logits
        adapters.begin_step(NO_ADAPTERS)  # heads that draft share the embedding
        self.stages.exclude(self.waited_s())
        self.rows.mark_computed(batch.rows, batch.lens)
        if self.stage.is_last and logits is not None and batch.sampled_rows.size:
            self.stages.begin("sample")
            self._sample(batch, logits, step)
        self.stages.begin(IDLE)
        # Without a stage of its own: 3 us in most steps.
        record = self.loaded.tap.end_step(batch, None if replay is None else replay.num_decodes)
        if not self.stage.is_last:
            store = partial(self._store_accepted, batch) if batch.has_drafts else None
            self.relay.expect(batch.sampled_rows, batch.sampled_positions, store, record)
        return step

    def _forward(self, batch: Batch, step: LaunchedStep) -> Tensor | None:
        """Return the logits of the sampled rows, None if no row samples; add rank 0's results of the prompts."""
        sampled_index, outputs = batch.sampled_index, self._output_tokens(batch)
        # A graph splits its decodes itself.
        attention = with_splits(batch.attention, self.config.cache.block_size, SplitRule.of(self.config))
        attention = with_states(attention, batch.state_runs, self.cache.states)
        attention = self.attention.begin_step(attention)
        media = None if batch.media is None else self.encoder_outputs.embeddings(batch.media)
        hidden = self.loaded.forward(
            batch.token_ids, batch.positions, self.cache.layers, attention, outputs, media
        )
        if not self.stage.is_last:
            return None
        if outputs is not None:
            sampled_index = outputs.sampled_index
        is_first = self.rank == 0
        if batch.pooled is not None and is_first:  # every rank has all hidden states
            assert self.loaded.pooler is not None, "the model has no pooling"
            step.vectors = self.loaded.pooler.pool(batch.pooled, hidden)
        if batch.scored is not None:
            scores = compute_prompt_logprobs(
                batch.scored, hidden, self.rows.token_ids, self._logits_of_rows, self.sampler
            )
            if is_first:
                step.launched.prompt_logprobs = scores
        if batch.sampled_rows.size == 0:
            return None
        if sampled_index is not None:
            hidden = hidden.index_select(0, sampled_index)
        return self.loaded.model.logits(hidden, batch.lora.sampled)

    def _logits_of_rows(self, hidden: Tensor, rows: IntArray) -> Tensor:
        """Return the logits of hidden states [n, E], each with its row's adapter."""
        return self.loaded.model.logits(hidden, make_groups(self.rows.lora_slots[rows], self.device))

    def _output_tokens(self, batch: Batch) -> OutputTokens | None:
        """Return the only tokens of the step whose hidden states are needed. Returns None for all.

        Adapters refer to tokens by their indices in the step. On a GPU all are computed, since chunks of one token
        could need kernel variants that are not compiled yet.
        """
        reads_all = self.loaded.tap.is_open or batch.scored is not None or batch.pooled is not None
        if batch.media is not None and self.loaded.has_deep_features:
            return None  # the last layer may be among the first, to whose outputs they are added
        if reads_all or not batch.lora.is_empty or batch.sampled_index is None:
            return None
        if self.device.type != "cpu" or not self.loaded.model.supports_outputs:
            return None
        return select_output_tokens(batch.sampled_index, len(batch.token_ids), batch.attention)

    def _sample(self, batch: Batch, logits: Tensor, step: LaunchedStep) -> None:
        """Sample tokens, and append those that count to their rows and to the step."""
        rows, positions = batch.sampled_rows, batch.sampled_positions
        gained = self.rows.unsettled.accepted
        token_ids, logprobs = self.sampler.sample(
            logits, self.rows.sampling, rows, positions, self.rows.logits_processors, gained
        )
        step.launched.failed_rows = self.rows.logits_processors.take_failures()
        if not batch.has_drafts:
            self.relay.pass_on(token_ids)
            self.rows.append(rows, positions, token_ids)
            self._copy_sampled(step, token_ids, logprobs)
        elif self.device.type == "cpu":
            self._verify_at_once(batch, token_ids, logprobs, step)
        else:
            self._verify_on_device(batch, token_ids, logprobs, step)

    def _copy_sampled(self, step: LaunchedStep, token_ids: Tensor, logprobs: SampledLogprobs | None) -> None:
        """Copy the tokens that rank 0 returns to the host."""
        if self.rank == 0:
            columns = [] if logprobs is None else logprobs.columns()
            step.copied, step.logprobs = HostCopy([token_ids, *columns]), logprobs

    def _verify_at_once(
        self, batch: Batch, token_ids: Tensor, logprobs: SampledLogprobs | None, step: LaunchedStep
    ) -> None:
        """Verify drafted tokens on a CPU, where the host has the samples."""
        rows, positions = batch.sampled_rows, batch.sampled_positions
        verdict = verify(rows, self.rows.equals_known(rows, positions, token_ids))
        is_retained = np.zeros(rows.size, np.bool_)
        is_retained[verdict.retained] = True
        self.relay.pass_on(token_ids, torch.from_numpy(is_retained))
        self._store_accepted(batch, is_retained)
        token_ids = token_ids.index_select(0, torch.from_numpy(verdict.retained))
        logprobs = None if logprobs is None else logprobs.select(verdict.retained)
        step.launched.token_counts, step.launched.num_drafted = verdict.token_counts, verdict.num_drafted
        self.rows.append(rows[verdict.retained], positions[verdict.retained], token_ids)
        self._copy_sampled(step, token_ids, logprobs)

    def _verify_on_device(
        self, batch: Batch, token_ids: Tensor, logprobs: SampledLogprobs | None, step: LaunchedStep
    ) -> None:
        """Verify drafted tokens on a GPU. The host goes on, unless a row's logits processors follow its tokens."""
        rows, positions, own = batch.sampled_rows, batch.sampled_positions, self.rows
        device_rows, is_match = own.replace_drafts(rows, positions, token_ids)
        is_retained, accepted = verify_on_device(device_rows, is_match, own.lens.size)
        self.relay.pass_on(token_ids, is_retained)
        if batch.state_runs is not None:
            self._repeat_runs(batch, accepted + 1)
        firsts, _ = runs_of(rows)
        own.count_sampled(rows[firsts], positions[firsts])
        columns = []
        if self.rank == 0:
            columns = [token_ids, *([] if logprobs is None else logprobs.columns())]
            step.logprobs, step.verified_rows = logprobs, rows
        verdict = HostCopy([is_retained, *columns])
        step.copied = verdict if self.rank == 0 else None
        own.unsettled.add(batch, accepted, verdict)
        if own.logits_processors.follow(rows, positions):
            own.unsettled.settle()
            retained = np.flatnonzero(verdict.wait()[0])
            counted = token_ids.index_select(0, to_device_once(retained, self.device))
            own.logits_processors.append(rows[retained], counted)

    def _store_accepted(self, batch: Batch, is_retained: npt.NDArray[np.bool_]) -> None:
        """Let the states of rows with drafted tokens be those after the accepted ones, where the host knows these."""
        if batch.state_runs is not None:
            counts = np.bincount(batch.sampled_rows[is_retained], minlength=self.rows.lens.size)
            self._repeat_runs(batch, to_device(counts, self.device, torch.int32))

    def _repeat_runs(self, batch: Batch, counts: Tensor) -> None:
        """Compute the states of rows with drafted tokens again, after the tokens that count.

        Args:
            counts: [R] int32 on the device, these tokens of each row.

        Its cost is that of the recurrences of these tokens, without the projections around them.
        """
        assert batch.state_runs is not None
        rows, num_samples = np.unique(batch.sampled_rows, return_counts=True)
        drafted, order = rows[num_samples > 1], np.argsort(batch.row_ids)
        runs = order[np.searchsorted(batch.row_ids, drafted, sorter=order)]
        device_runs, device_rows = to_device_together([runs, drafted], self.device)
        batch.state_runs.repeat(device_runs, counts.index_select(0, device_rows))
