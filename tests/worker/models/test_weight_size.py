"""Weights counted from the configuration, against the checkpoint's own tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.model_source import describe_files
from quire.worker.models.weight_size import WeightSize, make_meta_model, measure_weights


def numbers_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                count = 1
                for length in file.get_slice(name).get_shape():
                    count *= length
                total += count
    return total


def measure(folder: Path, dtype_bytes: int) -> WeightSize:
    model = describe_files(EngineOptions(str(folder)))
    return measure_weights(model, make_meta_model(model), dtype_bytes)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gemma2", "phi3"])
def test_size_is_that_of_the_checkpoint(make_model: Callable[..., Path], kind: str) -> None:
    folder = make_model(kind)
    size = measure(folder, 4)
    assert size.num_parameters == numbers_in(folder)
    assert size.num_bytes(4) == 4 * size.num_parameters


def test_weights_need_not_be_there(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = (make_model("llama") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    size = measure(tmp_path, 2)
    assert size.num_linear > size.num_other > 0


def test_quantized_weights_take_fewer_bytes(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = json.loads((make_model("llama") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = measure(tmp_path, 2)
    assert size.num_bytes(2) == round(size.num_linear * (0.5 + 2.5 / 32) + 2 * size.num_other)


def test_rank_with_whole_experts_has_the_larger_part_of_uneven_ones(make_model: Callable[..., Path]) -> None:
    folder = make_model("qwen3_moe")  # 6 experts, of three matrices [48, 64], in each of 3 layers
    size = measure(folder, 4)
    assert size.num_routed == 3 * 6 * 3 * 48 * 64
    sliced, whole = size.rank_bytes(4, 4), size.rank_bytes(4, 4, 6)
    assert sliced == size.num_bytes(4) // 4
    assert whole - sliced == 4 * size.num_routed // 12  # two of six, not a quarter
    assert size.rank_bytes(4, 2, 6) == size.rank_bytes(4, 2)


def test_expansion_of_latents_is_dequantized(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = json.loads((make_model("deepseek_v3") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = measure(tmp_path, 2)
    heads, latents = config["num_attention_heads"], config["kv_lora_rank"]
    dims = config["qk_nope_head_dim"] + config["v_head_dim"]
    assert size.num_expansion == config["num_hidden_layers"] * heads * dims * latents
    shared, whole = size.rank_bytes(2, 2), size.rank_bytes(2, 2, has_whole_attention=True)
    expected = (size.num_attention * size.linear_bytes + 2 * size.num_expansion) / 2
    assert whole - shared == pytest.approx(expected, abs=1)
