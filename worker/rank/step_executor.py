"""StepExecutor: launches the forward pass and the sampling of one gathered step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.step import StepResult
from ..attention import fixed_item_len, with_splits
from ..graphs.graphs import StepGraphs
from ..lora.adapters import RankAdapters
from ..lora.step_adapters import NO_ADAPTERS, make_groups
from ..memory.cache_engine import CacheEngine
from ..memory.device_to_host import HostCopy
from ..memory.host_to_device import to_device_once
from ..models.loader import Model
from ..models.output_tokens import OutputTokens, select_output_tokens
from ..pooling.pooler import Pooler
from ..sampling.prompt_logprobs import compute_prompt_logprobs
from ..sampling.sampler import Sampler
from ..speculation.feature_tap import FeatureTap
from ..speculation.speculator import Speculator
from ..speculation.verification import verify
from ..step.batch import Batch
from ..step.device_rows import DeviceRows
from ..step.launched_step import LaunchedStep
from ..step.step_stages import IDLE, StepStages


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExecutor:
    """Everything that computes a step, from its batch to its tokens.

    Attributes:
        rank: tensor-parallel rank; rank 0 alone copies tokens to the host.
        graphs: recorded steps; None if all steps are launched kernel by kernel.
        pooler: of models that embed or classify; None for others.
        speculator, tap: None without speculative decoding; tap, without a draft head.
        stages: those of the rank's steps.
    """

    config: EngineConfig
    rank: int
    device: torch.device
    model: Model
    pooler: Pooler | None
    cache: CacheEngine
    graphs: StepGraphs | None
    rows: DeviceRows
    sampler: Sampler
    adapters: RankAdapters
    speculator: Speculator | None
    tap: FeatureTap | None
    stages: StepStages

    def launch(self, batch: Batch, result: StepResult) -> LaunchedStep:
        """Launch a step, whose result is `result` when the device has computed it."""
        step = LaunchedStep(result)
        self.stages.begin("forward")
        self.cache.wait_for_swaps()
        self.adapters.begin_step(batch.lora)
        replayed = None if self.graphs is None else self.graphs.find_for(batch)
        logits = None if self.graphs is None else self.graphs.replay(batch)
        if logits is None:
            logits = self._forward(batch, step)
        self.adapters.begin_step(NO_ADAPTERS)  # heads that draft share the embedding
        self.rows.mark_computed(batch.rows, batch.lens)
        if logits is not None and batch.sampled_rows.size:
            self.stages.begin("sample")
            self._sample(batch, logits, step)
        self.stages.begin(IDLE)
        if self.tap is not None and self.tap.is_open and self.speculator is not None:
            # Without a stage of its own: 3 us in most steps.
            features = self.tap.take(batch, None if replayed is None else replayed.num_decodes)
            self.speculator.record(batch, features)
        return step

    def _forward(self, batch: Batch, step: LaunchedStep) -> Tensor | None:
        """Return the logits of the sampled rows, None if no row samples; add rank 0's results of the prompts."""
        sampled_index, outputs = batch.sampled_index, self._output_tokens(batch)
        # A graph splits its decodes itself.
        attention = with_splits(
            batch.attention, self.config.cache.block_size, fixed_item_len(self.config.parallel)
        )
        step_inputs = batch.token_ids, batch.positions, self.cache.layers, attention
        if outputs is not None:
            hidden = self.model.forward(*step_inputs, outputs=outputs)
            sampled_index = outputs.sampled_index
        elif self.tap is not None and self.tap.is_open:
            hidden = self.tap.forward(*step_inputs)
        else:
            hidden = self.model.forward(*step_inputs)
        is_first = self.rank == 0
        if batch.pooled is not None and is_first:  # every rank has all hidden states
            assert self.pooler is not None, "the model has no pooling"
            step.vectors = self.pooler.pool(batch.pooled, hidden)
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
        return self.model.logits(hidden, batch.lora.sampled)

    def _logits_of_rows(self, hidden: Tensor, rows: IntArray) -> Tensor:
        """Return the logits of hidden states [n, E], each with its row's adapter."""
        return self.model.logits(hidden, make_groups(self.rows.lora_slots[rows], self.device))

    def _output_tokens(self, batch: Batch) -> OutputTokens | None:
        """Return the only tokens of the step whose hidden states are needed. Returns None for all.

        Adapters refer to tokens by their indices in the step. On a GPU all are computed, since chunks of one token
        could need kernel variants that are not compiled yet.
        """
        is_tapped = self.tap is not None and self.tap.is_open
        reads_all = is_tapped or batch.scored is not None or batch.pooled is not None
        if reads_all or not batch.lora.is_empty or batch.sampled_index is None:
            return None
        if self.device.type != "cpu" or not self.model.supports_outputs:
            return None
        return select_output_tokens(batch.sampled_index, len(batch.token_ids), batch.attention)

    def _sample(self, batch: Batch, logits: Tensor, step: LaunchedStep) -> None:
        """Sample tokens, and append those that count to their rows and to the step."""
        rows, positions = batch.sampled_rows, batch.sampled_positions
        token_ids, logprobs = self.sampler.sample(
            logits, self.rows.sampling, rows, positions, self.rows.logits_processors
        )
        result = step.launched
        result.failed_rows = self.rows.logits_processors.take_failures()
        if batch.has_drafts:
            verdict = verify(rows, self.rows.equals_known(rows, positions, token_ids))
            rows, positions = rows[verdict.kept], positions[verdict.kept]
            token_ids = token_ids.index_select(0, to_device_once(verdict.kept, self.device))
            logprobs = None if logprobs is None else logprobs.select(verdict.kept)
            result.token_counts, result.num_drafted = verdict.token_counts, verdict.num_drafted
        self.rows.append(rows, positions, token_ids)
        if self.rank == 0:
            columns = [] if logprobs is None else logprobs.columns()
            step.copied, step.logprobs = HostCopy([token_ids, *columns]), logprobs
