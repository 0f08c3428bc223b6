"""FlashInfer with its recorded signatures: checks names, shapes and dtypes, and attends by definition.

As the library does, `plan` reads the lengths on the host, and copies to the device, through pinned memory that the
next plan overwrites, what `run` reads there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from recorded_signatures import Signatures
from torch import Tensor

SIGNATURES = Signatures("flashinfer")
INT32 = torch.int32

Launch = Callable[..., Any]


class FakeFlashInfer(ModuleType):
    """The package.

    Args:
        launch: calls a function of CPU tensors with tensors of the device, as one kernel.

    Attributes:
        num_plans, num_runs: calls so far.
    """

    def __init__(self, launch: Launch = lambda function, *args: function(*args)) -> None:
        super().__init__("flashinfer")
        self.launch = launch
        self.num_plans = self.num_runs = 0

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Decodes:
        return Decodes(self, *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Chunks:
        return Chunks(self, *args, **kwargs)


class _Wrapper:
    name = ""
    buffer_names: tuple[str, ...] = ()

    def __init__(self, module: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        given = SIGNATURES.bind(f"{self.name}.__init__", self, *args, **kwargs)
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8
        assert given["kv_layout"] == "HND"
        self.module, self.device = module, workspace.device
        self.is_graph: bool = given["use_cuda_graph"]
        self.uses_tensor_cores: bool = given.get("use_tensor_cores", True)
        self.buffers: list[Tensor] = [given[name] for name in self.buffer_names] if self.is_graph else []
        assert all(each.dtype == INT32 and each.device == self.device for each in self.buffers)
        self.staging = torch.empty(64, dtype=INT32, pin_memory=self.device.type == "cuda")
        self.plan_info = torch.empty(64, dtype=INT32, device=self.device)

    def _keep(self, *arrays: Tensor) -> None:
        """Copy what `run` reads to the device."""
        is_recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        assert not is_recording, "a plan cannot be recorded"
        assert all(each.dtype == INT32 for each in arrays)
        self.module.num_plans += 1
        self.staging.copy_(torch.arange(64) + self.module.num_plans)
        self.plan_info.copy_(self.staging, non_blocking=True)
        if not self.is_graph:
            self.buffers = [each.to(self.device, non_blocking=True) for each in arrays]
            return
        for buffer, array in zip(self.buffers, arrays, strict=True):
            assert len(array) <= len(buffer)
            buffer[: len(array)].copy_(array, non_blocking=True)

    def _note(self, plan: dict[str, Any], head_dim: int) -> None:
        assert plan["num_qo_heads"] % plan["num_kv_heads"] == 0
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        assert self.uses_tensor_cores or group in (1, 2, 3, 4, 6, 8)
        assert plan["pos_encoding_mode"] == "NONE"
        self.planned, self.head_dim = plan, head_dim

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given = SIGNATURES.bind(f"{self.name}.run", self, *args, **kwargs)
        q, cache, plan = given["q"], given["paged_kv_cache"], self.planned
        assert q.stride(2) == 1  # the others are arguments of the kernels
        assert (q.dtype, cache.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert q.shape[1:] == (plan["num_qo_heads"], self.head_dim)
        assert cache.shape[1:] == (2, plan["num_kv_heads"], plan["page_size"], self.head_dim)
        self.module.num_runs += 1

        def attend(q: Tensor, cache: Tensor, *buffers: Tensor) -> Tensor:
            return _attend(q, cache, plan, *buffers)

        found: Tensor = self.module.launch(attend, q, cache, *self._ragged())
        return found

    def _ragged(self) -> list[Tensor]:
        raise NotImplementedError


class Decodes(_Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper."""

    name = "BatchDecodeWithPagedKVCacheWrapper"
    buffer_names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        SIGNATURES.bind(f"{self.name}.plan", self, *args, **kwargs)
        plan = SIGNATURES.bind(f"{self.name}._plan_impl", self, *args, **kwargs)
        indptr, indices, last = plan["indptr"], plan["indices"], plan["last_page_len"]
        _check_pages(indptr, indices, last, plan["page_size"])
        if self.is_graph:
            assert len(last) == len(self.buffers[2])
            assert len(indptr) == len(self.buffers[0])
        self._note(plan, plan["head_dim"])
        self._keep(indptr, indices, last)
        self.size = len(last)

    def _ragged(self) -> list[Tensor]:
        starts = torch.arange(self.size + 1, dtype=INT32, device=self.device)
        return [*self.buffers, starts]


class Chunks(_Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper."""

    name = "BatchPrefillWithPagedKVCacheWrapper"
    buffer_names = (
        "paged_kv_indptr_buf",
        "paged_kv_indices_buf",
        "paged_kv_last_page_len_buf",
        "qo_indptr_buf",
    )

    def plan(self, *args: Any, **kwargs: Any) -> None:
        plan = SIGNATURES.bind(f"{self.name}.plan", self, *args, **kwargs)
        indptr, indices = plan["paged_kv_indptr"], plan["paged_kv_indices"]
        last, starts = plan["paged_kv_last_page_len"], plan["qo_indptr"]
        _check_pages(indptr, indices, last, plan["page_size"])
        assert len(starts) == len(indptr)
        assert (starts.diff() <= (indptr.diff() - 1) * plan["page_size"] + last).all()
        assert plan["causal"]
        self._note(plan, plan["head_dim_qk"])
        self._keep(indptr, indices, last, starts)

    def _ragged(self) -> list[Tensor]:
        return self.buffers


def _check_pages(indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> None:
    assert indptr.device.type == last.device.type == "cpu"
    assert len(indptr) == len(last) + 1
    assert int(indptr[0]) == 0
    assert len(indices) == int(indptr[-1])
    assert (indptr.diff() >= 1).all()
    assert ((last >= 1) & (last <= page_size)).all()


def _attend(
    q: Tensor,
    cache: Tensor,
    plan: dict[str, Any],
    indptr: Tensor,
    indices: Tensor,
    last: Tensor,
    starts: Tensor,
) -> Tensor:
    """Attend in float64, sequence by sequence."""
    out = torch.zeros_like(q)
    group = plan["num_qo_heads"] // plan["num_kv_heads"]
    for index, last_len in enumerate(last.tolist()):
        first, end = indptr[index : index + 2].tolist()
        start, stop = starts[index : index + 2].tolist()
        num_keys = (end - first - 1) * plan["page_size"] + last_len
        pages = cache[indices[first:end].long()].double()  # [n, 2, Hkv, B, D]
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,hkd->hqk", q[start:stop].double(), keys) * plan["sm_scale"]
        if cap := plan["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(num_keys)
        own = places[num_keys - (stop - start) :, None]
        hidden = places > own
        if plan["window_left"] >= 0:
            hidden |= places < own - plan["window_left"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[start:stop] = torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype)
    return out
