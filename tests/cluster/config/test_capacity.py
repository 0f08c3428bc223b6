"""Capacity: arithmetic on weights and KV cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from state_kinds import STATE_KINDS

from quire.cluster.config.capacity import GIB, Workload, capacity
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import gpu_bytes
from quire.cluster.config.model_source import describe_files
from quire.proto.config import ModelConfig
from quire.proto.errors import ConfigError

WORKLOAD = Workload(256, 8192, utilization=0.9, dtype_bytes=2, kv_bytes=2)


@pytest.fixture
def llama(make_model: Callable[..., Path]) -> ModelConfig:
    return describe_files(EngineOptions(str(make_model("llama"))))


def test_kv_bytes_per_token_are_those_of_the_cache_engine(llama: ModelConfig) -> None:
    from dataclasses import replace

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
