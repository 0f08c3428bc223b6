"""The delta rule in prompts by flash-linear-attention (Yang and Zhang, 2024): chunks of 64 tokens as matrix products.

Its chunked kernels compute gated delta nets (Yang et al., *Gated Delta Networks*, 2024) and Kimi delta attention
(Kimi Team, *Kimi Linear*, 2025) of all runs of a step together. Decode steps, which CUDA graphs record, and runs with
drafted tokens stay with quire's kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.recurrence import linear_attention
from ...kernels.state_runs import StateRuns
from ...proto.config import EngineConfig
from ...proto.model.gated_delta import GatedDeltaSpec
from ...proto.model.kimi_delta import KimiDeltaSpec
from ...proto.model.read_spec import read_spec
from ...proto.model.registry import FAMILIES
from .installed import FLASH_LINEAR_ATTENTION, Capability, Library
from .model_fit import DTYPES

# Numbers of a key that its kernels compute at most.
MAX_KEY_DIM = 256
# Tokens of its chunks: shorter runs leave most of a chunk empty.
CHUNK_LEN = 64


class FlashLinearAttention:
    """RecurrenceBackend with flash-linear-attention.

    Args:
        gated_delta_rule, kimi_delta: its ``chunk_gated_delta_rule`` and ``chunk_kda``.

    Attributes:
        num_calls, num_others: calls that the library computed, and that quire's kernels did.
    """

    library: ClassVar[Library] = FLASH_LINEAR_ATTENTION

    def __init__(self, gated_delta_rule: Callable[..., Any], kimi_delta: Callable[..., Any]) -> None:
        self._gated_delta_rule, self._kimi_delta = gated_delta_rule, kimi_delta
        self._packed: tuple[StateRuns, Tensor, Tensor | None] | None = None
        self.num_calls = self.num_others = 0

    @classmethod
    def load(cls, device: torch.device) -> FlashLinearAttention:
        """Import the installed library."""
        return cls(
            importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule,
            importlib.import_module("fla.ops.kda").chunk_kda,
        )

    @staticmethod
    def find_problem(config: EngineConfig, capability: Capability) -> str:
        """Return why it would compute no layer of a model; empty if it computes some."""
        model = config.model
        family = FAMILIES.get(model.architecture)
        mixers = () if family is None else [layer.mixer for layer in read_spec(model, family).layers]
        dims = {own.key_dim for own in mixers if isinstance(own, GatedDeltaSpec)}
        dims |= {own.head_dim for own in mixers if isinstance(own, KimiDeltaSpec)}
        if not dims:
            return "the model has no layers with a delta rule"
        if getattr(torch, model.dtype) not in DTYPES:
            return f"the model's dtype is {model.dtype}"
        return "" if min(dims) <= MAX_KEY_DIM else f"the model's keys have {min(dims)} numbers"

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        states: Tensor,
        runs: StateRuns,
        scale: float,
    ) -> Tensor:
        """Return `linear_attention` of these arguments."""
        if not self._suits(q, runs):
            self.num_others += 1
            return linear_attention(q, k, v, log_decay, beta, states, runs, scale)
        self.num_calls += 1
        starts, index = self._pack(runs)
        inputs = [x.contiguous() if index is None else x[index] for x in (q, k, v, log_decay, beta)]
        slots = runs.slots.long()
        initial = states.index_select(0, slots).float()
        initial.masked_fill_(runs.is_new.view(-1, 1, 1, 1), 0)
        compute = self._gated_delta_rule if log_decay.dim() == 2 else self._kimi_delta
        out, final = compute(
            *(x[None] for x in inputs),
            scale=scale,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=starts,
        )
        states.index_copy_(0, slots, final.to(states.dtype))
        return out[0] if index is None else v.new_empty(v.shape).index_copy_(0, index, out[0])

    def describe(self) -> str:
        """Return what has computed the delta rules so far."""
        if not self.num_calls:
            return "Triton kernels: no run had the length for flash-linear-attention yet"
        return f"flash-linear-attention in prompts of {CHUNK_LEN} tokens and more, Triton kernels otherwise"

    def _suits(self, q: Tensor, runs: StateRuns) -> bool:
        """Return whether the library computes a step: what it does cannot be recorded, since it reads the starts."""
        if q.dtype not in DTYPES or q.shape[2] > MAX_KEY_DIM or runs.max_len < CHUNK_LEN:
            return False
        # Without drafts all runs store their states.
        return runs.calls is None and not (q.is_cuda and torch.cuda.is_current_stream_capturing())

    def _pack(self, runs: StateRuns) -> tuple[Tensor, Tensor | None]:
        """Return the starts of the runs without gaps, [S + 1] int64, and their tokens; None for all.

        All layers of a step get the same tensors: the library keeps what it reads of the starts.
        """
        if self._packed is None or self._packed[0] is not runs:
            self._packed = runs, *_pack(runs)
        return self._packed[1:]


def _pack(runs: StateRuns) -> tuple[Tensor, Tensor | None]:
    if runs.shorter is None:
        return runs.starts.long(), None
    firsts = runs.starts[: len(runs.slots)].long()
    lens = runs.shorter.long() - firsts
    starts = torch.cat((lens.new_zeros(1), lens.cumsum(0)))
    index = torch.arange(int(starts[-1]), device=starts.device)
    return starts, index + (firsts - starts[:-1]).repeat_interleave(lens)
