"""The option attention_backend reaches the attention of prompts, and the log says what computes it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_references import find_reference
from stand_in_gpu import installed
from torch import Tensor

from quire.cluster.config.model_config import describe_model
from quire.kernels.flash_attention import FlashAttention
from quire.kernels.paged_attention import paged_prefill_attention
from quire.proto.errors import ConfigError
from quire.proto.step import RowSampling
from quire.worker.attention import log_chunk_attention
from quire.worker.comm.communicator import SingleRank
from quire.worker.rank import rank_memory
from quire.worker.rank.runner import ModelRunner

GREEDY = RowSampling(temperature=0.0)


def test_prompts_are_computed_by_the_chosen_library(
    make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, num_tokens = make_model("llama"), []
    num_layers = describe_model(folder, "llama").num_layers

    def attend(q: Tensor, *rest: Any) -> Tensor:
        num_tokens.append(len(q))
        return paged_prefill_attention(q, *rest)

    def generate() -> list[int]:
        sequence = planned([5, 17, 99, 3, 42], 4, GREEDY)
        engine = make_engine(folder)
        engine.generate([sequence], chunk_len=3)
        engine.close()
        tokens: list[int] = sequence.generated
        return tokens

    expected = generate()
    monkeypatch.setattr(rank_memory, "load_chunk_attention", lambda backend: attend)
    assert generate() == expected
    # Two chunks in each layer, and no decodes. The last layer computes the last token of each chunk.
    layers = [*[3] * (num_layers - 1), 1, *[2] * (num_layers - 1), 1]
    assert num_tokens == layers


def test_missing_library_is_a_config_error(make_model: Any, engine_config: Any) -> None:
    config = engine_config(make_model("llama"))
    config = replace(config, parallel=replace(config.parallel, attention_backend="flash_attn"))
    with pytest.raises(ConfigError, match="attention_backend is 'flash_attn', but there is no module"):
        ModelRunner(config, SingleRank())


@pytest.mark.parametrize(
    ("num_calls", "unsupported", "logged"),
    [
        (9, set(), "FlashAttention 3"),
        (9, {"attention sinks"}, "FlashAttention 3; Triton kernels in layers with attention sinks"),
        (0, {"a quantized KV cache"}, "since FlashAttention 3 does not support a quantized KV cache"),
        (0, set(), "Triton kernels, since FlashAttention 3 does not support latents"),
    ],
)
def test_log_says_what_computed_prompts(
    caplog: pytest.LogCaptureFixture, num_calls: int, unsupported: set[str], logged: str
) -> None:
    attention = FlashAttention(pytest.fail)
    attention.num_calls, attention.unsupported = num_calls, unsupported
    with caplog.at_level(logging.INFO, logger="quire"):
        log_chunk_attention(attention)
    assert caplog.text.rstrip().endswith(logged)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_ready_rank_with_latents_logs_that_flash_attention_is_not_used(
    make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_memory, "load_chunk_attention", lambda backend: FlashAttention(pytest.fail))
    folder = make_model("deepseek_v3", num_hidden_layers=1)
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "cuda_graphs": False}
    with installed(monkeypatch, stand_in=find_reference), caplog.at_level(logging.INFO, logger="quire"):
        make_engine(folder, device="cuda", **settings)
    assert "FlashAttention 3 does not support latents" in caplog.text
