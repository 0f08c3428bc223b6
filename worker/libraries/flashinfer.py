"""Attention by FlashInfer (Ye et al., *FlashInfer: Efficient and Customizable Attention Engine*, 2025).

Its wrappers take the KV cache in quire's layout, [N, 2, Hkv, B, D], which it calls HND. Before a step, `plan` divides
the work of each kind of layer on the host and copies the division to the device; recorded steps read it from there,
so they are planned outside of the recording, before each replay. The kernels of quire compute what it does not
support, and the chunks of recorded steps, which have few tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention_variant import AttentionVariant
from ...kernels.latent_attention import ChunkBounds
from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ..attention import OWN_ATTENTION, AttentionInputs, LayerCache, with_library
from ..memory.host_to_device import to_device_once
from .installed import FLASHINFER, Library
from .model_fit import find_unsupported, find_unsupported_model

LAYOUT = "HND"
# Heads that its kernels for keys and values are instantiated for.
HEAD_DIMS = (64, 128, 256)
# Query heads of a KV head from which its decoding kernels for tensor cores are chosen; those without support 1 to 3.
MIN_TENSOR_CORE_GROUP = 4
# Size that its documentation recommends for partial results of split sequences.
WORKSPACE_BYTES = 128 << 20
_NO_LENS: IntArray = np.empty(0, np.int32)


class FlashInfer:
    """AttentionBackend with FlashInfer.

    Args:
        module: the imported package.

    Attributes:
        num_calls: calls that FlashInfer computed.
        unsupported: features for which the kernels of quire computed other calls.
    """

    library: ClassVar[Library] = FLASHINFER

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device
        # Zeros, as its constructors demand. Steps share it, since they run one after the other.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.num_calls = 0
        self.unsupported: set[str] = set()
        self._step = _Step(self)
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    @classmethod
    def load(cls, device: torch.device) -> FlashInfer:
        """Import the installed library."""
        return cls(importlib.import_module("flashinfer"), device)

    @staticmethod
    def find_problem(config: EngineConfig) -> str:
        """Return why it would compute no layer of a model; empty if it computes some."""
        return find_unsupported_model(config, HEAD_DIMS.__contains__)

    def begin_step(self, inputs: AttentionInputs) -> AttentionInputs:
        groups = [inputs.of_group(group) for group in range(1 + len(inputs.other_groups))]
        lens = _NO_LENS if inputs.decode_lens is None else inputs.decode_lens
        if len(lens) != inputs.num_decodes or inputs.chunks is None:
            return inputs  # the host does not know the lengths
        self._step.begin([group.block_tables for group in groups], lens, inputs.chunks)
        return with_library(inputs, self._step)

    def for_graphs(self) -> FlashInferGraphs:
        return FlashInferGraphs(self)

    def describe(self) -> str:
        others = ", ".join(sorted(self.unsupported))
        if not self.num_calls:
            return f"Triton kernels, since FlashInfer does not support {others or 'these layers'}"
        return f"FlashInfer; Triton kernels in layers with {others}" if others else "FlashInfer"

    def is_supported(self, q: Tensor, kv_cache: LayerCache, variant: AttentionVariant) -> bool:
        """Return whether FlashInfer computes a layer, and count the call."""
        feature = find_unsupported(q, kv_cache, variant)
        if feature is None and q.shape[2] not in HEAD_DIMS:
            feature = f"heads of {q.shape[2]} numbers"
        if feature is None:
            self.num_calls += 1
            return True
        self.unsupported.add(feature)
        return False

    def wait_for_plan(self) -> None:
        """Wait until the device has the last plan: the next one overwrites the pinned memory that it is copied from.

        The copy follows the step before; so the host plans the next step while the device computes this one.
        """
        if self._planned is not None:
            self._planned.synchronize()

    def note_plan(self) -> None:
        """Note a plan, whose copies to the device have been launched."""
        if self._planned is not None:
            self._planned.record()


class FlashInferGraphs:
    """GraphAttention with FlashInfer: for each number of decodes, wrappers whose buffers the recordings read.

    Each wrapper takes 8 MiB of the device, and as much pinned memory.
    """

    def __init__(self, backend: FlashInfer) -> None:
        self._backend = backend
        self._steps: dict[int, _Step] = {}
        self._indices: dict[tuple[int, int], Tensor] = {}

    def of_decodes(self, num_decodes: int) -> _Step:
        if num_decodes not in self._steps:
            self._steps[num_decodes] = _Step(self._backend, num_decodes, self._indices)
        return self._steps[num_decodes]

    def plan(self, num_decodes: int, block_tables: Sequence[Tensor], lens: IntArray) -> None:
        padded = np.ones(num_decodes, np.int32)  # a plan needs one token per sequence
        padded[: len(lens)] = lens
        self.of_decodes(num_decodes).begin([each[:num_decodes] for each in block_tables], padded, None)


class _Kind(NamedTuple):
    """Properties of layers that share a plan."""

    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int
    soft_cap: float

    @property
    def plan_options(self) -> dict[str, Any]:
        """Return the arguments that both kinds of plans have; FlashInfer's window is without the query itself."""
        return {
            "window_left": self.window - 1 if self.window else -1,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
            "sm_scale": self.scale,
        }

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim, self.block_size

    @property
    def uses_tensor_cores(self) -> bool:
        return self.num_heads // self.num_kv_heads >= MIN_TENSOR_CORE_GROUP


@dataclass(frozen=True, slots=True)
class _Pages:
    """The blocks of sequences, from the first one that their queries attend to.

    Attributes:
        starts: [S + 1] int32 on the host, of each sequence's blocks among all.
        ids: [starts[-1]] int32 on the device.
        last_lens: [S] int32 on the host, tokens in the last block, from 1 to B.
    """

    starts: Tensor
    ids: Tensor
    last_lens: Tensor


class _Step:
    """StepAttention of one step after the other, planned when a layer of a new kind comes.

    Args:
        num_decodes: of recorded steps; None for steps that are launched kernel by kernel.
        indices: group and window |-> buffer for block ids, which all recorded steps share: one runs at a time.
    """

    def __init__(
        self,
        backend: FlashInfer,
        num_decodes: int | None = None,
        indices: dict[tuple[int, int], Tensor] | None = None,
    ) -> None:
        self._backend, self._num_decodes = backend, num_decodes
        self._indices = {} if indices is None else indices
        self._wrappers: dict[tuple[str, _Kind], Any] = {}
        self._planned: set[tuple[str, _Kind]] = set()
        self._tables: list[Tensor] = []
        self._lens = _NO_LENS
        self._chunks: ChunkBounds | None = None

    def begin(self, tables: list[Tensor], lens: IntArray, chunks: ChunkBounds | None) -> None:
        """Begin a step. Recorded kinds of layers are planned now, others at their first call.

        Args:
            tables: block tables of each cache group.
            lens: of the sequences with one token.
            chunks: None if the kernels of quire compute them.
        """
        self._backend.wait_for_plan()
        self._tables, self._lens, self._chunks = tables, lens, chunks
        self._planned.clear()
        if self._num_decodes is not None:
            for use, kind in self._wrappers:
                self._planned_wrapper(use, kind)

    def decode(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        if not self._backend.is_supported(q, kv_cache, variant):
            return OWN_ATTENTION.decode(q, kv_cache, inputs, scale, variant)
        return self._run("decode", q, kv_cache, scale, variant)

    def prefill(
        self,
        q: Tensor,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        if self._chunks is None or not self._backend.is_supported(q, kv_cache, variant):
            return OWN_ATTENTION.prefill(q, kv_cache, inputs, scale, variant)
        return self._run("prefill", q, kv_cache, scale, variant)

    def _run(
        self, use: str, q: Tensor, kv_cache: LayerCache, scale: float, variant: AttentionVariant
    ) -> Tensor:
        blocks = kv_cache.blocks
        num_kv_heads, block_size = blocks.shape[2:4]
        kind = _Kind(
            kv_cache.group, q.shape[1], num_kv_heads, q.shape[2], block_size, q.dtype, blocks.dtype, scale,
            variant.window, variant.soft_cap,
        )  # fmt: skip
        found: Tensor = self._planned_wrapper(use, kind).run(q, blocks)
        return found

    def _planned_wrapper(self, use: str, kind: _Kind) -> Any:
        """Return the wrapper of a kind of layer, planned for this step."""
        if (use, kind) in self._planned:
            return self._wrappers[use, kind]
        if (wrapper := self._wrappers.get((use, kind))) is None:
            wrapper = self._make_decodes(kind) if use == "decode" else self._make_chunks()
            self._wrappers[use, kind] = wrapper
        tables, num_decodes = self._tables[kind.group], len(self._lens)
        if use == "decode":
            pages = self._find_pages(tables[:num_decodes], self._lens, np.ones_like(self._lens), kind)
            wrapper.plan(pages.starts, pages.ids, pages.last_lens, *kind.shape, **kind.plan_options)
        else:
            assert self._chunks is not None, "the chunks of recorded steps are not planned"
            chunk_lens, seq_lens = (np.array(each, np.int32) for each in self._chunks)
            pages = self._find_pages(tables[num_decodes:], seq_lens, chunk_lens, kind)
            starts = self._to_host(_starts(chunk_lens))
            wrapper.plan(
                starts,
                pages.starts,
                pages.ids,
                pages.last_lens,
                *kind.shape,
                causal=True,
                **kind.plan_options,
            )
        self._backend.note_plan()
        self._planned.add((use, kind))
        return wrapper

    def _make_decodes(self, kind: _Kind) -> Any:
        backend, size = self._backend, self._num_decodes
        make = backend.module.BatchDecodeWithPagedKVCacheWrapper
        if size is None:
            return make(backend.workspace, LAYOUT, use_tensor_cores=kind.uses_tensor_cores)
        tables = self._tables[kind.group]
        indices = self._indices.get((kind.group, kind.window))
        if indices is None or len(indices) < tables.numel():
            # The largest steps are recorded first.
            indices = torch.empty(tables.numel(), dtype=torch.int32, device=backend.device)
            self._indices[kind.group, kind.window] = indices
        return make(
            backend.workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=kind.uses_tensor_cores,
            paged_kv_indptr_buffer=torch.empty(size + 1, dtype=torch.int32, device=backend.device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.empty(size, dtype=torch.int32, device=backend.device),
        )

    def _make_chunks(self) -> Any:
        return self._backend.module.BatchPrefillWithPagedKVCacheWrapper(self._backend.workspace, LAYOUT)

    def _find_pages(self, tables: Tensor, lens: IntArray, query_lens: IntArray, kind: _Kind) -> _Pages:
        """Return the blocks of sequences; those before a window are left out, which changes no distance."""
        ends = -(-lens // kind.block_size)
        firsts = np.zeros_like(ends)
        if kind.window:
            firsts = np.maximum(0, lens - query_lens + 1 - kind.window) // kind.block_size
        starts = _starts(ends - firsts)
        # Of each block its sequence, and its column in the sequence's table.
        counts, shifts = to_device_once(
            np.stack((ends - firsts, firsts - starts[:-1])).astype(np.int64), self._backend.device
        )
        total = int(starts[-1])
        sequences = torch.repeat_interleave(counts, output_size=total)
        columns = torch.arange(total, device=self._backend.device) + shifts[sequences]
        last_lens = lens - (ends - 1) * kind.block_size
        return _Pages(self._to_host(starts), tables[sequences, columns], self._to_host(last_lens))

    def _to_host(self, array: IntArray) -> Tensor:
        """Return an array for `plan`, which copies it to the device: pinned, so that the host need not wait."""
        tensor = torch.from_numpy(array.astype(np.int32, copy=False))
        return tensor.pin_memory() if self._backend.device.type == "cuda" else tensor


def _starts(counts: IntArray) -> IntArray:
    """Return the start of each run of these lengths, and the end of the last one."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
