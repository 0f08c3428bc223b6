"""StateModel: a model whose layers keep states, on ranks in threads, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from thread_group import ThreadGroup
from torch import Tensor

from quire.cluster.config.model_config import describe_model
from quire.kernels.latent_attention import ChunkBounds
from quire.kernels.state_runs import StateRuns
from quire.proto.config import ModelConfig
from quire.proto.model.quantization import read_quantization
from quire.proto.model.registry import state_layers
from quire.worker.attention import AttentionInputs, LayerCache, StepStates, with_groups
from quire.worker.comm.communicator import Communicator, SingleRank
from quire.worker.models.load_context import LoadContext
from quire.worker.models.loader import Model, load_model
from quire.worker.weights.checkpoint import Checkpoint

BLOCK_SIZE, BLOCKS_PER_SEQ, NUM_SEQS = 4, 32, 4


@dataclass
class Rank:
    """A rank's model with its caches and states."""

    model: Model
    caches: list[LayerCache]
    states: list[tuple[Tensor, ...]]


@dataclass
class StateModel:
    """A model on `tp` ranks; sequence i has the blocks and the state of place i + 1.

    Attributes:
        num_computed: tokens of each sequence so far.
    """

    folder: Path
    tp: int = 1
    dtype: torch.dtype = torch.float32
    num_computed: list[int] = field(default_factory=lambda: [0] * NUM_SEQS)

    def __post_init__(self) -> None:
        config = describe_model(self.folder, "model")
        self.config: ModelConfig = replace(
            config, dtype=str(self.dtype).removeprefix("torch."), max_model_len=BLOCK_SIZE * BLOCKS_PER_SEQ
        )
        self._group = ThreadGroup(self.tp)
        comms: list[Communicator] = (
            [SingleRank()] if self.tp == 1 else [self._group.communicator(rank) for rank in range(self.tp)]
        )
        self.ranks = self._run(self._make, comms)

    def _run(self, function: Any, arguments: Sequence[Any]) -> list[Any]:
        if len(arguments) == 1:
            return [function(arguments[0])]
        return self._group.run(function, arguments)

    def _make(self, comm: Communicator) -> Rank:
        quantization = read_quantization(self.config)
        load = LoadContext(Checkpoint(self.folder), comm, self.dtype, torch.device("cpu"), quantization)
        model = load_model(load, self.config)
        shapes = self.config.kv_shapes(self.tp)
        num_blocks = NUM_SEQS * BLOCKS_PER_SEQ + 1
        caches = [
            LayerCache(torch.randn(num_blocks, parts, heads, BLOCK_SIZE, dim).to(self.dtype))
            for parts, heads, dim in shapes
        ]
        # What an earlier sequence has left in a slot has no effect.
        states = [
            tuple(
                torch.randn(NUM_SEQS + 1, *tensor.shape).to(
                    getattr(torch, tensor.dtype) if tensor.is_recurrent else self.dtype
                )
                for tensor in layer
            )
            for layer in state_layers(self.config, self.tp)
        ]
        return Rank(model, caches, states)

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Compute new tokens of sequences; return the logits of each, [T, V]."""
        chunks = sorted(chunks, key=lambda chunk: len(chunk[1]) > 1)
        rows = [index for index, _ in chunks]
        lens = [len(tokens) for _, tokens in chunks]
        starts = [self.num_computed[row] for row in rows]
        num_decodes = lens.count(1)
        positions = torch.cat(
            [torch.arange(start, start + count) for start, count in zip(starts, lens, strict=True)]
        )
        tables = torch.stack(
            [torch.arange(BLOCKS_PER_SEQ, dtype=torch.int32) + 1 + row * BLOCKS_PER_SEQ for row in rows]
        )
        owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens))
        slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        bounds = torch.tensor([0, *lens]).cumsum(0).int()
        runs = StateRuns(
            torch.tensor([row + 1 for row in rows], dtype=torch.int32),
            bounds,
            torch.tensor([start == 0 for start in starts]),
            max(lens),
        )
        token_ids = torch.tensor([token for _, tokens in chunks for token in tokens], dtype=torch.int32)
        seq_lens = torch.tensor(
            [start + count for start, count in zip(starts, lens, strict=True)], dtype=torch.int32
        )

        def compute(rank: Rank) -> Tensor:
            inputs = AttentionInputs(
                num_decodes,
                slots,
                tables,
                bounds[num_decodes:] - bounds[num_decodes],
                seq_lens,
                chunks=ChunkBounds(lens[num_decodes:], seq_lens[num_decodes:].tolist()),
                states=StepStates(runs, rank.states),
            )
            hidden = rank.model.forward(
                token_ids, positions, rank.caches, with_groups(inputs, [slots], [tables])
            )
            logits: Tensor = rank.model.logits(hidden)
            return logits

        logits = torch.cat(self._run(compute, self.ranks), dim=1)[:, : self.config.vocab_size]
        for row, count in zip(rows, lens, strict=True):
            self.num_computed[row] += count
        parts = dict(zip(rows, logits.split(lens), strict=True))
        return [parts[index] for index in sorted(parts)]

    def compute(
        self, prompts: Sequence[Sequence[int]], chunk_lens: Sequence[int], num_decodes: int
    ) -> list[Tensor]:
        """Compute all tokens of prompts in steps that mix them; return the logits of each prompt, [T, V].

        Args:
            chunk_lens: of each prompt's chunks; its last tokens are computed one by one.
            num_decodes: how many of these there are.
        """
        parts: list[list[Tensor]] = [[] for _ in prompts]
        self.num_computed = [0] * NUM_SEQS
        while any(self.num_computed[row] < len(prompt) for row, prompt in enumerate(prompts)):
            chunks = []
            for row, prompt in enumerate(prompts):
                done = self.num_computed[row]
                left = len(prompt) - num_decodes - done
                count = 1 if left <= 0 else min(left, chunk_lens[row])
                if done < len(prompt):
                    chunks.append((row, prompt[done : done + count]))
            rows = sorted(row for row, _ in chunks)
            for row, logits in zip(rows, self.step(chunks), strict=True):
                parts[row].append(logits)
        return [torch.cat(own) for own in parts]
