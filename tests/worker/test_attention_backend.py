"""The option attention_backend reaches the attention of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from quire.cluster.config.model_config import describe_model
from quire.kernels.paged_attention import paged_prefill_attention
from quire.proto.errors import ConfigError
from quire.proto.step import RowSampling
from quire.worker import runner
from quire.worker.comm.communicator import SingleRank
from quire.worker.runner import ModelRunner

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
    monkeypatch.setattr(runner, "load_chunk_attention", lambda backend: attend)
    assert generate() == expected
    # Two chunks in each layer, and no decodes. The last layer computes the last token of each chunk.
    layers = [*[3] * (num_layers - 1), 1, *[2] * (num_layers - 1), 1]
    assert num_tokens == layers


def test_missing_library_is_a_config_error(make_model: Any, engine_config: Any) -> None:
    config = engine_config(make_model("llama"))
    config = replace(config, parallel=replace(config.parallel, attention_backend="flash_attn"))
    with pytest.raises(ConfigError, match="attention_backend is 'flash_attn', but there is no module"):
        ModelRunner(config, SingleRank())
