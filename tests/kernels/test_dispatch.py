"""Dispatch between references and kernels, and equality of their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched_kernels import ops_with_kernels

from quire.kernels import (
    activation,
    all_reduce_norm,
    block_tables,
    dispatch,
    fused_latent_norm_rope_write,
    fused_qk_norm_rope_kv_write,
    gumbel,
    latent_attention,
    logits,
    lora,
    moe,
    norm,
    paged_attention,
    paged_cache,
    quantized_linear,
    recurrence,
    routing,
    sampling,
    sparse_latent,
)

OPS: dict[str, list[Callable[..., Any]]] = {
    "activation": [
        activation.silu_and_mul,
        activation.gelu_tanh_and_mul,
        activation.clamped_silu_and_mul,
    ],
    "all_reduce_norm": [all_reduce_norm.all_reduce_add_rms_norm],
    "block_tables": [block_tables.update_block_tables],
    "sample_full": [sampling.sample_full, sampling.sample_greedy],
    "sample_top_k_top_p": [sampling.sample_top_k_top_p],
    "float8_groups": [quantized_linear.float8_groups_linear],
    "gumbel": [gumbel.random_keys],
    "norm": [norm.rms_norm, norm.add_rms_norm, norm.add_rms_norm_float8],
    "paged_cache": [paged_cache.copy_blocks, paged_cache.copy_scattered_blocks],
    "paged_decode": [paged_attention.paged_decode_attention],
    "paged_prefill": [paged_attention.paged_prefill_attention],
    "quantize_tokens": [quantized_linear.quantize_tokens],
    "quantized_linear": [quantized_linear.quantized_linear],
    "fused_latent_norm_rope_write": [fused_latent_norm_rope_write.fused_latent_norm_rope_write],
    "index_scores": [sparse_latent.index_scores],
    "sparse_latent": [sparse_latent.sparse_latent_attention],
    "latent_decode": [latent_attention.latent_decode_attention],
    "latent_prefill": [latent_attention.latent_prefill_attention],
    "lora": [lora.add_lora],
    "moe": [moe.sort_choices, moe.scatter_linear, moe.gather_linear, moe.gather_terms],
    "routing": [routing.select_experts],
    "process_logits": [logits.process_logits],
    "fused_qk_norm_rope_kv_write": [fused_qk_norm_rope_kv_write.fused_qk_norm_rope_kv_write],
    "topk_tokens": [sampling.topk_tokens],
    "recurrence": [recurrence.causal_conv, recurrence.linear_attention, recurrence.selective_scan],
}


@pytest.mark.parametrize(("module", "op"), [(module, op) for module, ops in OPS.items() for op in ops])
def test_kernel_has_signature_of_twin(device: str, module: str, op: Any) -> None:
    def parameters(function: Any) -> list[tuple[str, Any]]:
        signature = inspect.signature(function, eval_str=True)
        return [(parameter.name, parameter.default) for parameter in signature.parameters.values()]

    assert parameters(getattr(dispatch._load(module), op.__name__)) == parameters(op)


def test_all_ops_with_kernels_are_compared() -> None:
    assert {op.__name__ for ops in OPS.values() for op in ops} == ops_with_kernels()


def test_cpu_tensor_runs_twin() -> None:
    double = dispatch.on_gpu("of no kernel")(lambda x: x + x)
    assert double(torch.ones(1)).item() == 2


def test_gpu_tensor_without_triton_runs_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = SimpleNamespace(is_cuda=True)
    double = dispatch.on_gpu("nothing")(lambda x: x)
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    assert double(tensor) is tensor
