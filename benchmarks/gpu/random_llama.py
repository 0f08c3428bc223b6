"""A Llama with random weights on disk, made on the device so that 16 GB take seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.sizes import ModelShape

SHARD_BYTES = 4 << 30


def write_llama(folder: Path, shape: ModelShape, dtype: str, device: str) -> int:
    """Write the model unless it is there; return the bytes of its weights."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder, shape, dtype)
        weight_map, total = _write_shards(folder, shape, getattr(torch, dtype), device)
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return int(json.loads(index.read_text())["metadata"]["total_size"])


def _write_config(folder: Path, shape: ModelShape, dtype: str) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        **asdict(shape),
    }
    (folder / "config.json").write_text(json.dumps(config))


def _write_shards(
    folder: Path, shape: ModelShape, dtype: torch.dtype, device: str
) -> tuple[dict[str, str], int]:
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total, num_shards = 0, 0
    for name, size in _tensors(shape):
        tensor = _random_weight(name, size, dtype, device)
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > SHARD_BYTES:
            save_file(shard, folder / f"model-{num_shards:05}.safetensors")
            shard, num_shards = {}, num_shards + 1
        shard[name] = tensor
        weight_map[name] = f"model-{num_shards:05}.safetensors"
        total += tensor.nbytes
    save_file(shard, folder / f"model-{num_shards:05}.safetensors")
    return weight_map, total


def _tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for own, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            yield f"{layer}.self_attn.{own}_proj.weight", (rows, columns)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for own, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{layer}.mlp.{own}_proj.weight", (rows, columns)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def _random_weight(name: str, size: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return a weight that keeps the variance of its inputs, as benchmarks.random_models does."""
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    gain = 0.05 * size[1] ** 0.5 if "embed" in name else 2.0 if "q_proj" in name or "lm_head" in name else 1.0
    return (torch.randn(size, dtype=dtype, device=device) * gain * size[1] ** -0.5).cpu()
