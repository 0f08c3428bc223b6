"""`quire fit` and `quire models` as functions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.cli.fit import fit
from quire.cluster.cli.models import models
from quire.proto.errors import ConfigError

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}

SMALL = QWEN3_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def read_figures(shown: str) -> dict[str, list[str]]:
    """Return the figures that `quire fit` shows: name |-> that of each tensor-parallel size."""
    lines = (re.split(r"\s{2,}", line.strip()) for line in shown.splitlines())
    return {name: cells for name, *cells in lines if cells}


def test_fit_shows_each_parallel_size(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit(model, gpu="h200", gpus=4)
    shown = capsys.readouterr().out
    # Facts of the published model: 8.2 B parameters, 144 KiB of KV per token.
    assert "8.19 B parameters, 15.3 GiB of weights, context of 40,960 tokens" in shown
    figures = read_figures(shown)
    assert figures["tensor parallel"] == ["1", "2", "4"]
    assert figures["KV per token and GPU"] == ["144.0 KiB", "72.0 KiB", "36.0 KiB"]


def test_fit_shows_all_of_its_figures_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four sizes with all kinds of figures, and the splits over nodes."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"num_hidden_layers": 8}))
    fit(str(tmp_path), gpu="h100", gpus=8, max_loras=4)
    shown = capsys.readouterr().out
    assert len(read_figures(shown)["KV tokens"]) == 4
    fit(str(tmp_path), gpu="h100", gpus=8, nodes=2)
    assert "…" not in shown + capsys.readouterr().out


def test_fit_tells_what_serve_will_refuse_and_counts_small_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    fit(str(tmp_path), gpu="h200", gpus=1)
    shown = capsys.readouterr().out
    assert "`quire serve` will refuse the model: " in shown
    assert "no tokenizer" in shown
    assert "0.28 M parameters, 0.5 MiB of weights" in shown


def test_fit_of_latent_attention_counts_latents_once_per_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    fit(str(tmp_path), gpu="h200", gpus=8)
    shown = capsys.readouterr().out
    # Facts of the published model: 671 B parameters without the layer that predicts further tokens, and 576 numbers
    # per token and layer: 68.6 KiB, where keys and values of 128 heads would be 4,880 KiB.
    assert "671.03 B parameters" in shown
    figures = read_figures(shown)
    assert set(figures["KV per token and GPU"]) == {"68.6 KiB"}
    assert figures["tensor parallel"][-1] == "8"
    assert figures["KV tokens"][-1] != "does not fit"


def test_fit_of_data_parallel_attention_counts_the_tokens_of_all_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each GPU has whole attention, of 187 MB and 17 MB more for the expansion per layer, and less KV memory."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"num_hidden_layers": 8}))
    found = []
    for enabled in (False, True):
        fit(str(tmp_path), gpu="h200", gpus=8, enable_dp_attention=enabled)
        figures = read_figures(capsys.readouterr().out)
        assert figures["tensor parallel"][-1] == "8"
        weights, tokens = figures["weights per GPU"][-1], figures["KV tokens"][-1]
        found.append((float(weights.split()[0]), int(tokens.replace(",", ""))))
    (shared, all_tokens), (whole, own_tokens) = found
    assert whole - shared == pytest.approx(7 * 0.204e9 / 2**30, abs=0.11)  # 8 layers, float8
    assert 7 * all_tokens < own_tokens < 8 * all_tokens


def test_fit_counts_the_keys_of_indexers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token of DeepSeek V3.2 is cached as 512 + 64 + 128 numbers in each of 61 layers."""
    sparse = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    indexer = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | sparse | indexer))
    fit(str(tmp_path), gpu="h200", gpus=8)
    assert "83.9 KiB" in capsys.readouterr().out


def test_fit_counts_the_part_of_an_encoder_that_each_gpu_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The encoder of Qwen2.5-VL has 679 million parameters, of which 630 million are in the matrices of layers."""
    text = QWEN3_8B | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2_5_vl_text"}
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 4096,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def weights(**options: Any) -> tuple[str, list[float]]:
        fit(str(tmp_path), gpu="h200", gpus=2, **options)
        shown = capsys.readouterr().out
        return shown, [float(each.split()[0]) for each in read_figures(shown)["weights per GPU"]]

    (shown, shared), (_, whole) = weights(), weights(mm_encoder_tp_mode="data")
    text_alone, without = weights(language_model_only=True)
    assert "reads images (0.68 B parameters)" in shown
    assert "reads images" not in text_alone
    assert shared[0] == whole[0] == pytest.approx(without[0] + 2 * 0.679e9 / 2**30, abs=0.11)
    assert whole[1] == pytest.approx(without[1] + 2 * 0.679e9 / 2**30, abs=0.11)
    assert shared[1] == pytest.approx(whole[1] - 0.630e9 / 2**30, abs=0.11)


def test_fit_of_layers_of_different_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3n lists the sizes of its feed-forward networks."""
    gemma = {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
    }
    (tmp_path / "config.json").write_text(json.dumps(gemma | {"intermediate_size": [8192] * 4 + [16384]}))
    fit(str(tmp_path), gpus=1)
    assert "Gemma3nForCausalLM" in capsys.readouterr().out


def test_fit_of_data_parallel_attention_needs_latents(model: str) -> None:
    with pytest.raises(ConfigError, match="enable_dp_attention is for multi-head latent attention"):
        fit(model, gpu="h200", enable_dp_attention=True)


def test_fit_counts_whole_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 252 experts, two ranks hold 126 each, and eight at most 32."""
    fields = {"n_routed_experts": 252, "n_group": 1, "topk_group": 1, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | fields))
    weights = []
    for whole in (False, True):
        fit(str(tmp_path), gpu="h200", gpus=8, enable_expert_parallel=whole)
        figures = read_figures(capsys.readouterr().out)
        sizes = map(int, figures["tensor parallel"])
        weights.append(
            {
                size: float(cell.split()[0])
                for size, cell in zip(sizes, figures["weights per GPU"], strict=True)
            }
        )
    assert weights[0][2] == weights[1][2]
    assert weights[0][8] < weights[1][8] < 1.05 * weights[0][8]


def test_fit_of_whole_experts_needs_experts(model: str) -> None:
    with pytest.raises(
        ConfigError, match="enable_expert_parallel is for mixtures of experts, it has no experts"
    ):
        fit(model, gpu="h200", enable_expert_parallel=True)


def test_fit_counts_slots_of_adapters(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At rank 16 a slot has 16 numbers for each input of A and each output of B."""
    fit(model, gpu="h200", gpus=1, max_loras=8, lora_target_modules="o_proj")
    figures = read_figures(capsys.readouterr().out)
    assert figures["LoRA slots per GPU"] == [f"{8 * 36 * 16 * 2 * (4096 + 4096) / 2**30:.2f} GiB"]
    fit(model, gpu="h200", gpus=1)
    without = read_figures(capsys.readouterr().out)
    tokens, all_tokens = (int(each["KV tokens"][0].replace(",", "")) for each in (figures, without))
    assert 0 < all_tokens - tokens < 1000


def test_fit_fails_if_no_size_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="does not fit on 1 x t4"):
        fit(model, gpu="t4", gpus=1)
    assert "does not fit" in capsys.readouterr().out


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}


@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        (PACKED | {"ignore": ["re:("]}, r"pattern 're:\(' is invalid: missing \)"),
        (PACKED | {"ignore": ["re:(.*.*)*(.*.*)*x$"]}, "x\\$' takes too long; all patterns may take 1 s"),
        (PACKED | {"ignore": 5}, "5 is no list of layers' names"),
        (PACKED | {"ignore": [5]}, r"\[5\] is no list of layers' names"),
        (PACKED | {"config_groups": {"a": {"targets": 1, "weights": {"num_bits": 4, "type": "int"}}}},
         "1 is no list of layers' names"),
        (PACKED | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": "x"}}}},
         "group size 'x'"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"pattern 're:\(' is invalid: missing \)"),
        (GPTQ | {"dynamic": {"+:(.*.*)*x$": {}}}, "takes too long"),
        (GPTQ | {"dynamic": [1]}, r"dynamic \[1\] is no JSON object"),
        (GPTQ | {"dynamic": {".*": 1}}, "AttributeError"),
        (GPTQ | {"dynamic": {".*": {"bits": "4"}}}, "bits of dynamic '4'"),
        (GPTQ | {"dynamic": {".*": {"group_size": 0}}}, "group size 0"),
        (GPTQ | {"modules_in_block_to_quantize": 1}, "TypeError"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": {"a": 1}},
         r"{'a': 1} is no list of layers' names"),
    ],
)  # fmt: skip
def test_fit_refuses_malformed_quantization(
    tmp_path: Path, quantization: dict[str, Any], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=f"its quantization_config cannot be read: .*{problem}"):
        fit(str(tmp_path), gpus=1)


def test_models_lists_each_architecture_in_a_line_and_refusals_by_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models()
    served, *refusals = capsys.readouterr().out.split("\n\n")
    shown = {line.split()[0]: tuple(re.split(r"\s{2,}", line)[1:]) for line in served.splitlines()}
    assert shown["Qwen3ForCausalLM"] == ("text", "that divide its heads", "quire")
    assert shown["GPT2LMHeadModel"] == ("text", "1", "transformers")
    assert shown["OlmoForCausalLM"] == ("text", "that divide its KV heads", "transformers")
    assert shown["Gemma3ForConditionalGeneration"][-1] == "quire, as Gemma3ForCausalLM"
    assert shown["Qwen2_5_VLForConditionalGeneration"][0] == "text and images"
    assert shown["PhiMoEForCausalLM"][-1] == "quire, as PhimoeForCausalLM"
    assert shown["GPTNeoXForCausalLM"][-1] == "transformers"
    assert shown["MambaForCausalLM"] == ("text", "that divide its heads", "quire")
    refused = {
        name.strip(): reason
        for reason, *names in (each.strip().splitlines() for each in refusals)
        for name in names
    }
    assert refused["DogeForCausalLM"] == "refused, since its attention has a mask of its own:"
    assert refused["RwkvForCausalLM"].startswith("refused, since it keeps a recurrent state")
    assert "BertLMHeadModel" not in shown | refused
