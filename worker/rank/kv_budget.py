"""Memory of a GPU that is available for the KV cache, and LargestSteps, which need most of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.latent_attention import ChunkBounds
from ...kernels.state_runs import StateRuns
from ...proto.config import EngineConfig
from ...proto.step import RowSampling
from ..attention import AttentionInputs, OwnTokens, SplitRule, with_groups, with_splits, with_states
from ..memory.cache_engine import CacheEngine
from ..memory.host_to_device import to_device
from ..models.loader import Model
from ..sampling.sampler import Sampler
from ..sampling.sampling_table import SamplingTable


def available_kv_bytes(total: int, free: int, reserved: int, peak: int, utilization: float) -> int:
    """Return the bytes of a GPU that the KV cache may take.

    Args:
        total, free: of the whole GPU, as the driver reports them.
        reserved: by this process at the time of `free`.
        peak: largest allocation of this process during the profile run.
        utilization: fraction of the GPU that all processes together may use.
    """
    # Other processes start and end during the profile run: `free + reserved` can exceed `total`.
    used_by_others = max(0, total - free - reserved)
    return max(0, int(total * utilization) - used_by_others - peak)


def profile_kv_bytes(
    device: torch.device, utilization: float, profile_run: Callable[[], None], record: Callable[[], object]
) -> int:
    """Return available_kv_bytes of this GPU, with the peak of one `profile_run` and the memory of recordings.

    Args:
        record: makes the recordings and returns them, for this function to drop after it has measured them. A
            recording holds memory of torch's allocator and of the driver.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    recordings = record()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    peak += max(0, free_before - torch.cuda.mem_get_info(device)[0])
    del recordings
    torch.cuda.empty_cache()
    return available_kv_bytes(total, free, reserved, peak, utilization)


@dataclass(frozen=True, slots=True)
class LargestSteps:
    """Runs a step of prompts and a step of decodes, with all rows in the scratch block.

    Attributes:
        sampling: of rows without sequences.
        samples: this rank's pipeline stage samples.
    """

    config: EngineConfig
    model: Model
    sampler: Sampler
    sampling: SamplingTable
    device: torch.device
    samples: bool = True

    def run(self, cache: CacheEngine) -> None:
        """Run both steps, and sample from the vocabulary."""
        hidden = self._run_prompts(cache)
        if not self.config.model.generates:
            return
        if self.samples:
            self._run_samples(hidden)
        del hidden
        self._run_decodes(cache)

    def _run_samples(self, hidden: Tensor) -> None:
        """Sample for every row of the largest step of decodes."""
        rows = np.arange(self.config.max_decode_tokens, dtype=np.int32)
        logits = self.model.logits(hidden[to_device(rows % len(hidden), self.device, torch.int64)])
        # Sampling from the whole vocabulary has the largest intermediate tensors, and truncated sampling of several
        # ranks, which gather the logits.
        rows %= self.config.scheduler.max_num_seqs  # drafted tokens repeat their rows
        truncated = SamplingTable(self.config.scheduler.max_num_seqs, self.config.model.vocab_size)
        for row in rows:
            truncated.put(int(row), RowSampling(top_k=2, top_p=0.9))
        for table in (self.sampling, truncated):
            self.sampler.sample(logits, table, rows, rows)

    def _run_prompts(self, cache: CacheEngine) -> Tensor:
        """Return the hidden states of a step with the largest number of prompt tokens."""
        block_size = self.config.cache.block_size
        # A block may be longer than the model's context.
        chunk_len = min(block_size, self.config.model.max_model_len)
        num_seqs = -(-self.config.scheduler.max_num_batched_tokens // chunk_len)
        position = torch.arange(chunk_len, device=self.device).repeat(num_seqs)
        inputs = AttentionInputs(
            num_decodes=0,
            slot_mapping=position,
            block_tables=self._int_zeros(num_seqs, 1),
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * chunk_len,
            seq_lens=self._int_zeros(num_seqs) + chunk_len,
            chunks=ChunkBounds([chunk_len] * num_seqs, [chunk_len] * num_seqs),
            own_tokens=self._own_tokens(len(position)),
        )
        inputs = with_states(self._in_all_groups(inputs), self._runs(num_seqs, chunk_len), cache.states)
        return self.model.forward(torch.zeros_like(position), position, cache.layers, inputs)

    def _run_decodes(self, cache: CacheEngine) -> None:
        """Run the largest step of decodes with the longest block tables, by which attention sizes its workspace."""
        config = self.config
        num_seqs = min(config.max_decode_tokens, config.scheduler.max_num_batched_tokens)
        position = torch.zeros(num_seqs, dtype=torch.int64, device=self.device)
        inputs = AttentionInputs(
            num_decodes=num_seqs,
            slot_mapping=position,
            block_tables=self._int_zeros(num_seqs, config.max_blocks_per_seq),
            query_start=self._int_zeros(1),
            seq_lens=self._int_zeros(num_seqs) + 1,
            chunks=ChunkBounds([], []),
            decode_lens=np.ones(num_seqs, np.int32),
            own_tokens=self._own_tokens(num_seqs),
        )
        inputs = self._in_all_groups(inputs)
        inputs = with_splits(inputs, config.cache.block_size, SplitRule.of(config))
        inputs = with_states(inputs, self._runs(num_seqs, 1), cache.states)
        self.model.forward(torch.zeros_like(position), position, cache.layers, inputs)

    def _runs(self, num_seqs: int, run_len: int) -> StateRuns | None:
        """Return runs of equal length, all in the scratch slot; None for a model without states."""
        if not self.config.model.has_states:
            return None
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * run_len
        is_new = torch.ones(num_seqs, dtype=torch.bool, device=self.device)
        return StateRuns(self._int_zeros(num_seqs), starts, is_new, run_len)

    def _own_tokens(self, num_tokens: int) -> OwnTokens | None:
        """Return all tokens with data-parallel attention: a rank may have all sequences of a step."""
        if not self.config.parallel.enable_dp_attention:
            return None
        tokens = torch.arange(num_tokens, device=self.device)
        return OwnTokens(tokens, tokens)

    def _in_all_groups(self, inputs: AttentionInputs) -> AttentionInputs:
        num_groups = sum(self.config.cache_layout.splits)
        return with_groups(inputs, [inputs.slot_mapping] * num_groups, [inputs.block_tables] * num_groups)

    def _int_zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)
