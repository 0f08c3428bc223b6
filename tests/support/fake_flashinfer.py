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
        # Also accepted: the sizes and dtype of tiny models.
        self.latent_dims = 512, 64
        self.latent_dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
        self.num_plans = self.num_runs = 0
        self.mla = ModuleType("flashinfer.mla")
        self.mla.BatchMLAPagedAttentionWrapper = (  # type: ignore[attr-defined]
            lambda *args, **kwargs: Latents(self, *args, **kwargs)
        )
        self.comm = _Comm("flashinfer.comm")
        # Names of compiled kernels with sinks |-> head sizes: the library compiles one size under a name.
        self.compiled: dict[str, tuple[int, int]] = {}

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Decodes:
        return Decodes(self, *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Chunks:
        return Chunks(self, *args, **kwargs)

    def BatchAttentionWithAttentionSinkWrapper(self, *args: Any, **kwargs: Any) -> WithSinks:
        return WithSinks(self, *args, **kwargs)


class _Wrapper:
    name = ""
    init = ""
    buffer_names: tuple[str, ...] = ()

    def __init__(self, module: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        given = SIGNATURES.bind(self.init or f"{self.name}.__init__", self, *args, **kwargs)
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8
        assert given.get("kv_layout", "HND") == "HND"
        self.given, self.module, self.device = given, module, workspace.device
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
        q, cache = given["q"], given["paged_kv_cache"]
        plan = self.planned | {name: given[name] or 1.0 for name in ("k_scale", "v_scale")}
        assert cache.dtype.itemsize == 1 or plan["k_scale"] == plan["v_scale"] == 1.0
        sinks = self._check_sinks(*given["args"])
        assert q.stride(2) == 1  # the others are arguments of the kernels
        assert (q.dtype, cache.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert q.shape[1:] == (plan["num_qo_heads"], self.head_dim)
        assert cache.shape[1:] == (2, plan["num_kv_heads"], plan["page_size"], self.head_dim)
        self.module.num_runs += 1

        def attend(q: Tensor, cache: Tensor, sinks: Tensor, *buffers: Tensor) -> Tensor:
            return _attend(q, cache, plan, sinks, *buffers)

        found: Tensor = self.module.launch(attend, q, cache, sinks, *self._ragged())
        return found

    def _check_sinks(self, *args: Any) -> Tensor:
        """Return the sinks, minus infinity for none."""
        assert not args
        return torch.full((self.planned["num_qo_heads"],), -torch.inf, device=self.device)

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


class WithSinks(Chunks):
    """BatchAttentionWithAttentionSinkWrapper: that of chunks with another constructor and two more arguments."""

    init = "BatchAttentionWithAttentionSinkWrapper.__init__"

    def __init__(self, module: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        given = self.given
        assert given["backend"] in ("fa2", "fa3", "auto")
        dims = given["head_dim_qk"], given["head_dim_vo"]
        name = f"{given['q_data_type']}_{given['window_left'] >= 0}_{given['backend']}"
        assert module.compiled.setdefault(name, dims) == dims

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs)
        for name in ("q_data_type", "kv_data_type", "head_dim_qk", "window_left"):
            assert self.planned[name] == self.given[name]
        assert not self.planned["logits_soft_cap"], "its kernels have none"

    def _check_sinks(self, *args: Any) -> Tensor:
        sinks, scale = args
        assert sinks.dtype == torch.float32
        assert sinks.shape == (self.planned["num_qo_heads"],)
        assert scale == self.planned["sm_scale"]
        found: Tensor = sinks
        return found


class Latents(_Wrapper):
    """BatchMLAPagedAttentionWrapper, for one query per sequence."""

    name = "BatchMLAPagedAttentionWrapper"
    buffer_names = "kv_indptr", "kv_indices", "kv_len_arr", "qo_indptr"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        plan = SIGNATURES.bind(f"{self.name}.plan", self, *args, **kwargs)
        indptr, indices = plan["kv_indptr"], plan["kv_indices"]
        lens, starts, page_size = plan["kv_len_arr"], plan["qo_indptr"], plan["page_size"]
        last = lens - (indptr.diff() - 1) * page_size
        _check_pages(indptr, indices, last, page_size)
        assert lens.device.type == starts.device.type == "cpu"
        assert torch.equal(starts, torch.arange(len(lens) + 1, dtype=INT32))
        assert (plan["head_dim_ckv"], plan["head_dim_kpe"]) in ((512, 64), self.module.latent_dims)
        assert plan["kv_data_type"] in self.module.latent_dtypes
        self.planned = plan
        self._keep(indptr, indices, lens, starts)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        given = SIGNATURES.bind(f"{self.name}.run", self, *args, **kwargs)
        names = "q_nope", "q_pe", "ckv_cache", "kpe_cache"
        q, q_shared, latents, shared = (given[name] for name in names)
        plan = self.planned
        assert {each.stride(2) for each in (q, q_shared, latents, shared)} == {1}
        assert q.dtype == q_shared.dtype == plan["q_data_type"]
        assert latents.dtype == shared.dtype == plan["kv_data_type"]
        assert q.shape[1:] == (plan["num_heads"], plan["head_dim_ckv"])
        assert q_shared.shape[1:] == (plan["num_heads"], plan["head_dim_kpe"])
        assert latents.shape[1:] == (plan["page_size"], plan["head_dim_ckv"])
        assert shared.shape[1:] == (plan["page_size"], plan["head_dim_kpe"])
        self.module.num_runs += 1

        def attend(q: Tensor, q_shared: Tensor, latents: Tensor, shared: Tensor, *buffers: Tensor) -> Tensor:
            return _attend_latents(q, q_shared, latents, shared, plan, *buffers)

        found: Tensor = self.module.launch(attend, q, q_shared, latents, shared, *self.buffers)
        return found


def _attend_latents(
    q: Tensor,
    q_shared: Tensor,
    latents: Tensor,
    shared: Tensor,
    plan: dict[str, Any],
    indptr: Tensor,
    indices: Tensor,
    lens: Tensor,
    starts: Tensor,
) -> Tensor:
    """Attend in float64 with one query per sequence."""
    out = torch.zeros_like(q)
    for index, length in enumerate(lens.tolist()):
        first, end = indptr[index : index + 2].tolist()
        pages = indices[first:end].long()
        values, keys = (each[pages].flatten(0, 1)[:length].double() for each in (latents, shared))
        scores = q[index].double() @ values.T + q_shared[index].double() @ keys.T
        out[index] = ((scores * plan["sm_scale"]).softmax(dim=1) @ values).to(q.dtype)
    return out


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
    sinks: Tensor,
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
        values = values * plan["v_scale"]
        factor = plan["sm_scale"] * plan["k_scale"]
        scores = torch.einsum("qhd,hkd->hqk", q[start:stop].double(), keys) * factor
        if cap := plan["logits_soft_cap"]:
            scores = cap * torch.tanh(scores / cap)
        places = torch.arange(num_keys)
        own = places[num_keys - (stop - start) :, None]
        hidden = places > own
        if plan["window_left"] >= 0:
            hidden |= places < own - plan["window_left"]
        columns = sinks.double()[:, None, None].expand(-1, stop - start, 1)
        scores = torch.cat((scores.masked_fill(hidden, -torch.inf), columns), dim=-1)
        weights = scores.softmax(dim=-1)[:, :, :num_keys]
        out[start:stop] = torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype)
    return out


class _Comm(ModuleType):
    """flashinfer.comm: sums by the exchange of handles, through which its ranks meet."""

    class AllReduceFusionPattern:
        kAllReduce, kARResidualRMSNorm = 0, 1

    def create_allreduce_fusion_workspace(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        given = SIGNATURES.bind("create_allreduce_fusion_workspace", *args, **kwargs)
        backend = given["comm_backend"]
        assert given["backend"] == "trtllm"
        assert (backend.Get_rank(), backend.Get_size()) == (given["rank"], given["world_size"])
        assert given["dtype"] in (torch.bfloat16, torch.float16)
        handles = backend.allgather(("handle", given["rank"]))
        assert [rank for _, rank in handles] == list(range(given["world_size"]))
        backend.barrier()
        return given

    def allreduce_fusion(self, *args: Any, **kwargs: Any) -> Tensor:
        given = SIGNATURES.bind("allreduce_fusion", *args, **kwargs)
        x, workspace = given["input"], given["workspace"]
        residual, out, weight = given["residual_in"], given["norm_out"], given["rms_gamma"]
        assert given["pattern"] == self.AllReduceFusionPattern.kARResidualRMSNorm
        assert x.shape[0] <= workspace["max_token_num"]
        assert x.shape[1] == workspace["hidden_dim"] == len(weight)
        tensors = x, residual, out, weight, given["residual_out"]
        assert all(each.is_contiguous() and each.dtype == workspace["dtype"] for each in tensors)
        sent = workspace["comm_backend"].allgather(x.view(torch.uint8).numpy().tobytes())
        parts = [torch.frombuffer(bytearray(each), dtype=x.dtype).view(x.shape) for each in sent]
        total = torch.stack(parts).double().sum(dim=0) + residual.double()
        given["residual_out"].copy_(total)
        factors = (total.square().mean(dim=1, keepdim=True) + given["rms_eps"]).rsqrt()
        out.copy_(total * factors * weight.double())
        result: Tensor = out
        return result
