"""Capacity: arithmetic on weights and KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from state_kinds import STATE_KINDS

from quire.cluster.config.capacity import GIB, Workload, capacity
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import gpu_bytes
from quire.cluster.config.model_source import describe_files
from quire.proto.config import ModelConfig
from quire.proto.errors import ConfigError
from quire.proto.vision import EncoderLayers, VisionSpec

WORKLOAD = Workload(256, 8192, utilization=0.9, dtype_bytes=2, kv_bytes=2)


@pytest.fixture
def llama(make_model: Callable[..., Path]) -> ModelConfig:
    return describe_files(EngineOptions(str(make_model("llama"))))


def test_kv_bytes_per_token_are_those_of_the_cache_engine(llama: ModelConfig) -> None:
    import torch

    from quire.cluster.config.resolve import engine_config
    from quire.worker.memory.cache_engine import bytes_per_block

    for kv_dtype, kv_bytes in (("auto", 2), ("int8", 1)):
        options = EngineOptions("it", kv_cache_dtype=kv_dtype, block_size=16)
        block = bytes_per_block(engine_config(options, llama), torch.bfloat16)
        found = capacity(llama, 0, 80 * GIB, 1, replace(WORKLOAD, kv_bytes=kv_bytes))
        assert found.kv_token_bytes * 16 == block


def test_capacity_grows_with_ranks_and_shrinks_with_weights(llama: ModelConfig) -> None:
    one, two = (capacity(llama, 60 * GIB // size, 80 * GIB, size, WORKLOAD) for size in (1, 2))
    assert two.num_kv_tokens > 2 * one.num_kv_tokens > 0
    assert capacity(llama, 80 * GIB, 80 * GIB, 1, WORKLOAD).num_kv_tokens == 0


@pytest.mark.parametrize(("text", "gib"), [("h200", 141), ("H100", 80), ("24GiB", 24)])
def test_gpu_is_named_or_given_by_size(text: str, gib: int) -> None:
    assert gpu_bytes(text) == int(gib * GIB * 0.96)


def test_unknown_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu is 'abacus', must be a size such as 80GB, or one of t4"):
        gpu_bytes("abacus")


def test_states_are_those_of_the_cache_engine_and_take_their_memory(make_model: Callable[..., Path]) -> None:
    import torch

    from quire.cluster.config.resolve import engine_config
    from quire.worker.memory.cache_engine import bytes_per_state

    model = describe_files(EngineOptions(str(make_model("lfm2", **STATE_KINDS["lfm2"]))))
    config = engine_config(EngineOptions("it"), model)
    found = capacity(model, 0, 80 * GIB, 1, WORKLOAD)
    assert found.state_bytes == bytes_per_state(config, torch.bfloat16) > 0
    assert found.num_state_slots > WORKLOAD.max_num_seqs
    assert found.concurrency(16) <= found.num_state_slots - 1
    assert capacity(model, 80 * GIB, 80 * GIB, 1, WORKLOAD).num_kv_tokens == 0


def test_ranks_hold_their_part_of_an_encoder_of_images_and_its_outputs(llama: ModelConfig) -> None:
    """A rank has all of what is beside the layers, and the encoder outputs of four steps."""
    layers = EncoderLayers(10, size=1024, inner=4096, num_heads=16)
    vision = VisionSpec("any", 0, 4096, layers=(layers,), num_parameters=layers.num_parameters() + 1_000_000)
    sees = replace(llama, vision=vision)
    text, one, two, three, whole = (
        capacity(model, GIB, 80 * GIB, size, workload)
        for model, size, workload in (
            (llama, 1, WORKLOAD),
            (sees, 1, WORKLOAD),
            (sees, 2, WORKLOAD),
            (sees, 3, WORKLOAD),
            (sees, 2, replace(WORKLOAD, shares_encoder=False)),
        )
    )
    matrices = 10 * (4 * 1024 + 2 * 4096) * 1024
    biases, others = 10 * (3 * 1024 + 4096), 10 * (2 * 1024) + 1_000_000
    assert one.weight_bytes - text.weight_bytes == 2 * (matrices + biases + others)
    assert two.weight_bytes - text.weight_bytes == matrices + biases + 2 * others
    assert three.weight_bytes == whole.weight_bytes == one.weight_bytes  # three ranks have no equal parts
    output_bytes = 4 * 8192 * 4096 * 2
    fewer = (text.num_slots - one.num_slots) * text.kv_token_bytes
    assert fewer == pytest.approx(
        one.weight_bytes - text.weight_bytes + output_bytes, abs=2 * text.kv_token_bytes
    )
    packed = {"bits": 4, "quant_method": "gptq", "group_size": 32}
    quantized = replace(sees, hf=sees.hf | {"quantization_config": packed})
    assert capacity(quantized, GIB, 80 * GIB, 2, WORKLOAD).weight_bytes == one.weight_bytes
    online = replace(sees, quantization="int8")
    assert capacity(online, GIB, 80 * GIB, 2, WORKLOAD).weight_bytes == two.weight_bytes
