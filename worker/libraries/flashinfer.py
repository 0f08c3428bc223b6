"""Attention by FlashInfer (Ye et al., *FlashInfer: Efficient and Customizable Attention Engine*, 2025).

Its wrappers take the KV cache in quire's layout, [N, 2, Hkv, B, D], which it calls HND. Before a step, `plan` divides
the work of each kind of layer on the host and copies the division to the device; recorded steps read it from there,
so they are planned outside of the recording, before each replay. The kernels of quire compute what it does not
support, and the chunks of recorded steps, which have few tokens.

Layers with attention sinks have a wrapper of their own for decodes and chunks, and so have decodes of multi-head
latent attention, whose latents [C] and shared keys [R] are two tensors there and parts of one here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention_variant import PLAIN, AttentionVariant
from ...kernels.latent_attention import ChunkBounds
from ...proto.block_tables import IntArray
from ...proto.config import EngineConfig
from ...proto.kv_layout import FP8_PER_TENSOR
from ..attention import OWN_ATTENTION, AttentionInputs, LayerCache, with_library
from ..memory.host_to_device import to_device_once
from .installed import FLASHINFER, Capability, Library
from .model_fit import find_unsupported, find_unsupported_model

LAYOUT = "HND"
# Heads that its kernels for keys and values are instantiated for.
HEAD_DIMS = (64, 128, 256)
# Elements of latents and of shared keys that its wrapper for latents is tested with.
LATENT_DIMS = ((512, 64),)
# Before Blackwell, on which it warns of poor performance.
LATENTS_BELOW: Capability = (10, 0)
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
    reads_lens = True

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device
        # Zeros, as its constructors demand. Steps share it, since they run one after the other.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.num_calls = 0
        self.unsupported: set[str] = set()
        self._has_latents = device.type != "cuda" or _has_latents(torch.cuda.get_device_capability(device))
        # Its compiled kernels with sinks are named without the size of heads: a process can have those of one size.
        self._sink_head_dim: int | None = None
        self._step = _Step(self)
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    @classmethod
    def load(cls, device: torch.device) -> FlashInfer:
        """Import the installed library."""
        return cls(importlib.import_module("flashinfer"), device)

    @staticmethod
    def find_problem(config: EngineConfig, capability: Capability) -> str:
        """Return why it would compute no layer of a model; empty if it computes some."""
        return find_unsupported_model(
            config, HEAD_DIMS.__contains__, LATENT_DIMS if _has_latents(capability) else (), (FP8_PER_TENSOR,)
        )

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
        feature = find_unsupported(q, kv_cache, variant, supports_fixed_scales=variant.sinks is None)
        if feature is None and q.shape[2] not in HEAD_DIMS:
            feature = f"heads of {q.shape[2]} numbers"
        if feature is None and variant.sinks is not None:
            feature = self._find_unsupported_sinks(q.shape[2], variant)
        return self._count(feature)

    def supports_latents(self, q: Tensor, kv_cache: LayerCache, value_dim: int) -> bool:
        """Return whether FlashInfer computes the decodes of a layer with latents, and count the call."""
        feature = find_unsupported(q, kv_cache, PLAIN)
        if not self._has_latents:
            feature = "latents on this GPU"
        elif feature is None and (value_dim, q.shape[2] - value_dim) not in LATENT_DIMS:
            feature = f"latents of {value_dim} and {q.shape[2] - value_dim} numbers"
        return self._count(feature)

    def _find_unsupported_sinks(self, head_dim: int, variant: AttentionVariant) -> str | None:
        if variant.soft_cap:
            return "attention sinks and a soft cap"
        if self._sink_head_dim is None:
            self._sink_head_dim = head_dim
        return (
            None if head_dim == self._sink_head_dim else f"attention sinks with heads of {head_dim} numbers"
        )

    def _count(self, feature: str | None) -> bool:
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


def _has_latents(capability: Capability) -> bool:
    return capability < LATENTS_BELOW


class _Kind(NamedTuple):
    """Properties of calls that share a plan.

    Attributes:
        use: ``decode``, ``prefill``, or ``latents`` for decodes of latents.
        value_dim: C of latents; of others the same as head_dim.
    """

    use: str
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    @property
    def plan_options(self) -> dict[str, Any]:
        return {
            "window_left": self.window_left,
            "logits_soft_cap": self.soft_cap,
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
            "sm_scale": self.scale,
        }

    @property
    def window_left(self) -> int:
        """Return the keys before the query's own; -1 for all."""
        return self.window - 1 if self.window else -1

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
        lens: [S] int32 on the host, tokens in these blocks.
        last_lens: [S] int32 on the host, tokens in the last block, from 1 to B.
    """

    starts: Tensor
    ids: Tensor
    lens: Tensor
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
        self._wrappers: dict[_Kind, Any] = {}
        self._planned: set[_Kind] = set()
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
            for kind in self._wrappers:
                self._planned_wrapper(kind)

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

    def decode_latents(
        self, q: Tensor, kv_cache: LayerCache, inputs: AttentionInputs, scale: float, value_dim: int
    ) -> Tensor:
        if not self._backend.supports_latents(q, kv_cache, value_dim):
            return OWN_ATTENTION.decode_latents(q, kv_cache, inputs, scale, value_dim)
        blocks = kv_cache.blocks[:, 0, 0]
        kind = _Kind(
            "latents", kv_cache.group, q.shape[1], 1, q.shape[2], value_dim, blocks.shape[1], q.dtype, blocks.dtype,
            scale,
        )  # fmt: skip
        parts = (part for each in (q, blocks) for part in each.split((value_dim, q.shape[2] - value_dim), 2))
        found: Tensor = self._planned_wrapper(kind).run(*parts)
        return found

    def _run(
        self, use: str, q: Tensor, kv_cache: LayerCache, scale: float, variant: AttentionVariant
    ) -> Tensor:
        blocks, head_dim = kv_cache.blocks, q.shape[2]
        num_kv_heads, block_size = blocks.shape[2:4]
        kind = _Kind(
            use, kv_cache.group, q.shape[1], num_kv_heads, head_dim, head_dim, block_size, q.dtype, blocks.dtype,
            scale, variant.window, variant.soft_cap, variant.sinks is not None,
        )  # fmt: skip
        more = () if variant.sinks is None else (variant.sinks, scale)
        scales = {}
        if kv_cache.fixed_scales is not None:
            scales = dict(zip(("k_scale", "v_scale"), kv_cache.fixed_scales, strict=True))
        found: Tensor = self._planned_wrapper(kind).run(q, blocks, *more, **scales)
        return found

    def _planned_wrapper(self, kind: _Kind) -> Any:
        """Return the wrapper of a kind of layer, planned for this step."""
        if kind in self._planned:
            return self._wrappers[kind]
        if (wrapper := self._wrappers.get(kind)) is None:
            self._wrappers[kind] = wrapper = self._make(kind)
        tables, num_decodes, lens = self._tables[kind.group], len(self._lens), self._lens
        if kind.use == "prefill":
            assert self._chunks is not None, "the chunks of recorded steps are not planned"
            query_lens, lens = (np.array(each, np.int32) for each in self._chunks)
            tables = tables[num_decodes:]
        else:
            query_lens, tables = np.ones_like(lens), tables[:num_decodes]
        pages = self._find_pages(tables, lens, query_lens, kind)
        starts = self._to_host(_starts(query_lens))
        if kind.use == "latents":
            wrapper.plan(
                starts,
                pages.starts,
                pages.ids,
                pages.lens,
                kind.num_heads,
                kind.value_dim,
                kind.head_dim - kind.value_dim,
                kind.block_size,
                causal=False,
                sm_scale=kind.scale,
                q_data_type=kind.dtype,
                kv_data_type=kind.kv_dtype,
            )
        elif kind.use == "decode" and not kind.has_sinks:
            wrapper.plan(pages.starts, pages.ids, pages.last_lens, *kind.shape, **kind.plan_options)
        else:
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
        self._planned.add(kind)
        return wrapper

    def _make(self, kind: _Kind) -> Any:
        module, workspace = self._backend.module, self._backend.workspace
        # The wrapper for sinks is one of chunks.
        buffers = self._make_buffers(kind, _BUFFERS["prefill" if kind.has_sinks else kind.use])
        if kind.use == "latents":
            return module.mla.BatchMLAPagedAttentionWrapper(workspace, **buffers)
        if kind.has_sinks:
            return module.BatchAttentionWithAttentionSinkWrapper(
                workspace,
                LAYOUT,
                # Its kernels for Hopper do not divide the keys of a decode.
                backend="fa2" if kind.use == "decode" else "auto",
                q_data_type=kind.dtype,
                kv_data_type=kind.kv_dtype,
                head_dim_qk=kind.head_dim,
                head_dim_vo=kind.head_dim,
                window_left=kind.window_left,
                **buffers,
            )
        if kind.use == "prefill":
            return module.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        return module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, LAYOUT, use_tensor_cores=kind.uses_tensor_cores, **buffers
        )

    def _make_buffers(self, kind: _Kind, names: _Buffers) -> dict[str, Any]:
        """Return the arguments of a wrapper with the buffers of its plans; empty unless steps are recorded."""
        size, device = self._num_decodes, self._backend.device
        if size is None:
            return {}
        tables = self._tables[kind.group]
        indices = self._indices.get((kind.group, kind.window))
        if indices is None or len(indices) < tables.numel():
            # The largest steps are recorded first.
            indices = torch.empty(tables.numel(), dtype=torch.int32, device=device)
            self._indices[kind.group, kind.window] = indices
        arguments: dict[str, Any] = {"use_cuda_graph": True, names.ids: indices}
        lens = {names.starts: size + 1, names.lens: size, names.query_starts: size + 1}
        for name, length in lens.items():
            if name:
                arguments[name] = torch.empty(length, dtype=torch.int32, device=device)
        return arguments

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
        page_lens = lens - firsts * kind.block_size
        return _Pages(
            self._to_host(starts),
            tables[sequences, columns],
            self._to_host(page_lens),
            self._to_host(last_lens),
        )

    def _to_host(self, array: IntArray) -> Tensor:
        """Return an array for `plan`, which copies it to the device: pinned, so that the host need not wait."""
        tensor = torch.from_numpy(array.astype(np.int32, copy=False))
        return tensor.pin_memory() if self._backend.device.type == "cuda" else tensor


class _Buffers(NamedTuple):
    """Names of the arguments with a wrapper's buffers; empty for one that it does not have."""

    starts: str
    ids: str
    lens: str
    query_starts: str = ""


_BUFFERS = {
    "decode": _Buffers("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
    "prefill": _Buffers(
        "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf", "qo_indptr_buf"
    ),
    "latents": _Buffers("kv_indptr", "kv_indices", "kv_len_arr", "qo_indptr"),
}


def _starts(counts: IntArray) -> IntArray:
    """Return the start of each run of these lengths, and the end of the last one."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
