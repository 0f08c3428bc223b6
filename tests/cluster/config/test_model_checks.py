"""Model directories that are refused before anything reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.model_checks import MAX_HEADER_BYTES
from quire.cluster.config.resolve import resolve
from quire.proto.errors import ConfigError
from quire.proto.options.values import show

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def make_directory(folder: Path, header: bytes = b"{}", **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(EngineOptions(str(folder), device="cpu", skip_tokenizer_init=True), Machine(2, 0))
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "max_position_embeddings", "head_dim", "num_experts",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [10**9, 1e300, float("inf")])
def test_absurd_size_is_refused_before_it_is_used(tmp_path: Path, name: str, value: Any) -> None:
    for changes in ({name: value}, {"text_config": {name: value}}):
        folder = make_directory(tmp_path, **changes)
        assert f"config.json: {name} is {show(value)}, must be from" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [0, -1, "many", None, float("nan")])
def test_size_that_is_no_positive_number_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    message = refusal(make_directory(tmp_path, **{name: value}))
    assert name in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_labels", 10**9),
        ("num_nextn_predict_layers", 10**9),
        ("num_mtp_modules", 10**9),
        ("attention_types", [[["global", "local"], 10**9]]),
        ("intermediate_size", [128, 10**9]),
    ],
)
def test_absurd_count_is_refused_also_in_lists(tmp_path: Path, name: str, value: Any) -> None:
    assert f"config.json: {name} is 1000000000, must be from" in refusal(
        make_directory(tmp_path, **{name: value})
    )


GEMMA_3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "layer_types": ["full_attention"] * 2,
    "num_kv_shared_layers": 0,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 10**30},
        {"architectures": {"a": 1}},
        {"architectures": [[]]},
        {"architectures": ["x" * 100_000]},
        {"model_type": "x" * 100_000},
        {"hidden_act": "x" * 100_000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x" * 100_000}},
        GEMMA_3N | {"hidden_size_per_layer_input": {"a": 1}},
        GEMMA_3N | {"altup_num_inputs": [3]},
        {"num_key_value_heads": [1]},
        {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "num_key_value_heads": 0},
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "head_dim": {"a": 1}},
        {"rope_parameters": [1]},
        {"rope_scaling": 5, "rope_parameters": 7},
        {"quantization_config": 5},
        {"quantization_config": {"quant_method": []}},
        DEEPSEEK | {"kv_lora_rank": [float("nan")]},
        DEEPSEEK | {"qk_rope_head_dim": float("inf")},
        DEEPSEEK | {"kv_lora_rank": "x"},
    ],
)
def test_value_of_another_type_is_refused_in_few_words(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(refusal(make_directory(tmp_path, **changes))) < 2000


@pytest.mark.parametrize("path", ["x" * 100_000, [0] * 5000, "\0", "/", ".."])
def test_module_that_is_no_folder_is_refused_in_few_words(tmp_path: Path, path: Any) -> None:
    folder = make_directory(tmp_path)
    (folder / "modules.json").write_text(json.dumps([{"type": "Pooling", "path": path}]))
    assert len(refusal(folder)) < 2000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[1]", "is not a JSON object"),
        (b'{"a":' + b"[" * 20 + b"1" + b"]" * 20 + b"}", "nested more than"),
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a":' * 20 + b"1" + b"}" * 20, "nested more than"),
        (b" " * (9 << 20), "must have at most"),
    ],
)
def test_config_that_is_no_object_of_moderate_size_is_refused(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    folder = make_directory(tmp_path)
    (folder / "config.json").write_bytes(content)
    assert problem in refusal(folder)


def test_header_of_a_million_tensors_is_refused_without_reading_it(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    folder = make_directory(tmp_path, b" " * (MAX_HEADER_BYTES + 1))
    assert f"header length is {MAX_HEADER_BYTES + 1} bytes" in refusal(folder)
    assert 1_000_000 * len(json.dumps({"layer": entry})) > MAX_HEADER_BYTES


def test_absurd_config_is_refused_without_importing_transformers(tmp_path: Path) -> None:
    """transformers takes seconds to import, and hangs on a billion layers."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from quire.cluster.config.model_config import describe_model\n"
        "from quire.proto.errors import ModelLoadError\n"
        "try:\n"
        "    describe_model(Path(sys.argv[1]), 'x')\n"
        "except ModelLoadError as error:\n"
        "    print(error, 'transformers' in sys.modules)\n"
    )
    folder = make_directory(tmp_path, num_hidden_layers=10**9)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=True,
    )
    assert done.stdout.strip().endswith("num_hidden_layers is 1000000000, must be from 1 to 4096 False")
