"""Stage `slices`: some layers of gpt-oss-20b and of DeepSeek V3 at their real shapes, with quantized experts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.block_float8_ops import has_deep_gemm
from benchmarks.gpu.checkpoints import Shapes, write_checkpoint
from benchmarks.gpu.engine import measure_rows, random_prompt, serving
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes

BLOCK, MXFP4_GROUP_LEN = 128, 32


@dataclass(frozen=True, slots=True)
class OssShape:
    """Shape of a gpt-oss, with the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    sliding_window: int


@dataclass(frozen=True, slots=True)
class DeepSeekShape:
    """Shape of a DeepSeek V3, with the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


# 4 of 24 layers; and the first layer of 61, one with experts, and a quarter of these, as of one of four ranks.
OSS = OssShape(201088, 2880, 2880, 4, 64, 8, 64, 32, 4, 128)
DEEPSEEK = DeepSeekShape(129280, 7168, 18432, 2048, 2, 128, 64, 8, 8, 4, 1536, 512, 128, 64, 128)
TINY_OSS = OssShape(512, 64, 64, 2, 4, 2, 16, 4, 2, 16)
TINY_DEEPSEEK = DeepSeekShape(512, 256, 256, 128, 2, 4, 8, 2, 2, 1, 128, 128, 64, 64, 64)
ROWS, LENGTH = (1, 16, 64), 1024


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    is_large = sizes.device == "cuda"
    oss, deepseek = (OSS, DEEPSEEK) if is_large else (TINY_OSS, TINY_DEEPSEEK)
    if record.begins("slices.gpt_oss", 40):
        with record.case("slices.gpt_oss"):
            write_oss(work / "gpt-oss", oss, sizes)
            measure(record, work / "gpt-oss", sizes, "slices.gpt_oss")
    if record.begins("slices.deepseek", 60):
        with record.case("slices.deepseek"):
            write_deepseek(work / "deepseek", deepseek, sizes)
            measure(record, work / "deepseek", sizes, "slices.deepseek")
    if has_deep_gemm(sizes) and record.begins("slices.deepseek.deep_gemm", 40):
        library = {"linear_backend": "deep_gemm", "moe_backend": "deep_gemm"}
        with record.case("slices.deepseek.deep_gemm"):
            measure(record, work / "deepseek", sizes, "slices.deepseek.deep_gemm", **library)


def measure(record: Record, model: Path, sizes: Sizes, name: str, **options: Any) -> None:
    """Measure decodes of some rows, and a prompt."""
    rows_of_steps, length = (ROWS, LENGTH) if sizes.device == "cuda" else ((1, 2), sizes.decodes[0][1])
    with serving(record, model, sizes, name, **options) as server:
        for rows in rows_of_steps:
            prompts = [random_prompt(sizes, index, length - sizes.num_timed) for index in range(rows)]
            handles = [server.submit(prompt, length) for prompt in prompts]
            step_s = measure_rows(server, handles, sizes.num_timed // 2)
            server.abort()
            record.add(f"{name}.decode.{rows}x{length}.step_ms", 1e3 * step_s, "ms")
        prompt_len = sizes.prefill_lens[-1]
        prompt = random_prompt(sizes, 3000, prompt_len)
        seconds = server.prefill([server.submit(prompt, 1)])
        server.drain()
        record.add(f"{name}.prefill.{prompt_len}.tokens_per_s", prompt_len / seconds, "tokens/s")


def write_oss(folder: Path, shape: OssShape, sizes: Sizes) -> None:
    """Write a gpt-oss of random weights with experts in MXFP4, unless it is there."""
    kinds = ["sliding_attention", "full_attention"] * shape.num_hidden_layers
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": 131072,
        "layer_types": kinds[: shape.num_hidden_layers],
        "quantization_config": {"quant_method": "mxfp4"},
        **asdict(shape),
    }
    write_checkpoint(folder, config, _oss_shapes(shape), sizes.dtype, sizes.device, _oss_weight)


def _oss_shapes(shape: OssShape) -> Shapes:
    hidden, inner, count = shape.hidden_size, shape.intermediate_size, shape.num_local_experts
    q, kv = (number * shape.head_dim for number in (shape.num_attention_heads, shape.num_key_value_heads))
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        for own, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            yield f"{layer}.self_attn.{own}_proj.weight", (rows, columns)
            yield f"{layer}.self_attn.{own}_proj.bias", (rows,)
        yield f"{layer}.self_attn.sinks", (shape.num_attention_heads,)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.router.weight", (count, hidden)
        yield f"{layer}.mlp.router.bias", (count,)
        for own, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            name, num_groups = f"{layer}.mlp.experts.{own}_proj", columns // MXFP4_GROUP_LEN
            yield f"{name}_blocks", (count, rows, num_groups, MXFP4_GROUP_LEN // 2)
            yield f"{name}_scales", (count, rows, num_groups)
            yield f"{name}_bias", (count, rows)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def write_deepseek(folder: Path, shape: DeepSeekShape, sizes: Sizes) -> None:
    """Write a DeepSeek V3 of random weights in float8 with a scale per block, unless it is there."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": 163840,
        "num_key_value_heads": shape.num_attention_heads,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        **asdict(shape),
    }  # fmt: skip
    write_checkpoint(folder, config, _deepseek_shapes(shape), sizes.dtype, sizes.device, _deepseek_weight)


def _deepseek_shapes(shape: DeepSeekShape) -> Shapes:
    hidden, heads, rank = shape.hidden_size, shape.num_attention_heads, shape.kv_lora_rank
    qk_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{attention}.q_a_layernorm.weight", (shape.q_lora_rank,)
        yield f"{attention}.kv_a_layernorm.weight", (rank,)
        yield from _float8(f"{attention}.q_a_proj", shape.q_lora_rank, hidden)
        yield from _float8(f"{attention}.q_b_proj", heads * qk_dim, shape.q_lora_rank)
        yield from _float8(f"{attention}.kv_a_proj_with_mqa", rank + shape.qk_rope_head_dim, hidden)
        yield from _float8(
            f"{attention}.kv_b_proj", heads * (shape.qk_nope_head_dim + shape.v_head_dim), rank
        )
        yield from _float8(f"{attention}.o_proj", hidden, heads * shape.v_head_dim)
        if index == 0:
            yield from _feed_forward(f"{layer}.mlp", hidden, shape.intermediate_size)
            continue
        yield f"{layer}.mlp.gate.weight", (shape.n_routed_experts, hidden)
        yield f"{layer}.mlp.gate.e_score_correction_bias", (shape.n_routed_experts,)
        for expert in range(shape.n_routed_experts):
            yield from _feed_forward(f"{layer}.mlp.experts.{expert}", hidden, shape.moe_intermediate_size)
        yield from _feed_forward(f"{layer}.mlp.shared_experts", hidden, shape.moe_intermediate_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def _feed_forward(name: str, hidden: int, inner: int) -> Shapes:
    for own, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield from _float8(f"{name}.{own}_proj", rows, columns)


def _float8(name: str, num_outputs: int, num_inputs: int) -> Shapes:
    yield f"{name}.weight", (num_outputs, num_inputs)
    yield f"{name}.weight_scale_inv", (-(-num_outputs // BLOCK), -(-num_inputs // BLOCK))


def _oss_weight(name: str, shape: tuple[int, ...], device: str) -> Tensor | None:
    """Return the codes and powers of two of MXFP4; None for other tensors."""
    if name.endswith("_blocks"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).cpu()
    if name.endswith("_scales"):
        spread = 2.9 * math.sqrt(
            shape[-1] * MXFP4_GROUP_LEN
        )  # of a sum of K products with codes of all values
        return torch.full(shape, 127 - round(math.log2(spread)), dtype=torch.uint8)
    return None


def _deepseek_weight(name: str, shape: tuple[int, ...], device: str) -> Tensor | None:
    """Return the codes and scales of projections in float8; None for other tensors."""
    if name.endswith("_scale_inv"):
        return torch.full(shape, (shape[1] * BLOCK) ** -0.5)
    if "_proj" in name:
        return torch.randn(shape, device=device).to(torch.float8_e4m3fn).cpu()
    if name.endswith("correction_bias"):
        return torch.zeros(shape)
    return None
