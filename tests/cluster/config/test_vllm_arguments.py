"""Arguments of vLLM become quire's, are ignored with one warning, or are refused with the reason."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.server_options import ServerOptions
from quire.cluster.config.vllm_arguments import (
    VLLM_ARGUMENTS,
    Ignored,
    Renamed,
    translate_arguments,
)
from quire.proto.errors import ConfigError
from quire.proto.options.option import declared_options

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
# Options that mean in `vllm serve` what they mean here.
SAME_NAMES = (
    "allowed_media_domains", "api_key", "block_size", "chat_template", "dtype", "enable_auto_tool_choice",
    "enable_eplb", "enable_expert_parallel", "enable_lora",
    "gpu_memory_utilization", "kv_cache_dtype", "language_model_only", "limit_mm_per_prompt",
    "lora_modules", "mamba_ssm_cache_dtype", "max_cpu_loras", "max_logprobs",
    "max_lora_rank", "max_loras", "max_model_len", "max_num_batched_tokens", "max_num_seqs",
    "mm_processor_kwargs", "pipeline_parallel_size", "quantization",
    "reasoning_parser", "revision", "runner", "seed", "served_model_name", "skip_tokenizer_init",
    "speculative_config",
    "tensor_parallel_size", "tool_call_parser", "trust_request_chat_template",
)  # fmt: skip


def test_page_lists_each_argument() -> None:
    options = {**declared_options(EngineOptions), **declared_options(ServerOptions)}
    assert options.keys() >= set(SAME_NAMES)
    text = PAGE.read_text()
    (same,) = re.findall(r"^These mean the same; .*?:\n\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert re.findall(r"`--([\w-]+)`", same) == [flag(name) for name in SAME_NAMES]
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert rows == [f"| `--{flag(name)}` | {each.words} |" for name, (_, each) in VLLM_ARGUMENTS.items()]


def test_forty_flags_of_vllm_have_an_effect_or_a_warning() -> None:
    accepted = [name for name, (_, each) in VLLM_ARGUMENTS.items() if isinstance(each, Renamed | Ignored)]
    assert len(SAME_NAMES) + len(accepted) >= 40


def test_no_argument_hides_an_option() -> None:
    options = {**declared_options(EngineOptions), **declared_options(ServerOptions)}
    assert not VLLM_ARGUMENTS.keys() & options.keys()
    for _, treatment in VLLM_ARGUMENTS.values():
        if isinstance(treatment, Renamed):
            assert treatment.option in options


@pytest.mark.parametrize(
    ("given", "translated"),
    [
        ({"enforce_eager": True}, {"cuda_graphs": False}),
        ({"enforce_eager": False}, {"cuda_graphs": True}),
        ({"enable_prefix_caching": False}, {"prefix_caching": False}),
        ({"kv_cache_memory_bytes": "1GiB"}, {"kv_cache_memory": "1GiB"}),
        ({"async_scheduling": True}, {"max_steps_in_flight": 2}),
        ({"dtype": "half", "kv_cache_dtype": "fp8"}, {"dtype": "float16", "kv_cache_dtype": "fp8_e4m3"}),
        ({"dtype": "auto", "max_num_seqs": 4}, {"dtype": "auto", "max_num_seqs": 4}),
        ({"port": 9000}, {"http": "127.0.0.1:9000"}),
        ({"host": "::1"}, {"http": "[::1]:8000"}),
        ({"host": "0.0.0.0", "port": 80}, {"http": "0.0.0.0:80"}),
        ({"ssl_keyfile": Path("/key")}, {"tls_key": Path("/key")}),
        ({"trust_remote_code": False, "data_parallel_size": 1, "load_format": "safetensors"}, {}),
        ({"tokenizer": "demo", "enable_chunked_prefill": True, "cpu_offload_gb": 0}, {}),
        (
            {"structured_outputs_config": '{"backend": "guidance", "reasoning_parser": ""}'},
            {"structured_outputs_backend": "guidance"},
        ),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, {"disable_any_whitespace": True}),
    ],
)
def test_argument_becomes_an_option(given: dict[str, Any], translated: dict[str, Any]) -> None:
    assert translate_arguments(given, "demo") == translated


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code is True: code of a model's directory is never run"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill is False, must be True: long prompts"),
        ({"tokenizer": "/other"}, "tokenizer is '/other', must be the model itself"),
        ({"enforce_eager": True, "cuda_graphs": True}, "are the same option, must be given once"),
        ({"port": 1, "http": "127.0.0.1:2"}, "host and port are the address that http sets"),
        ({"structured_outputs_config": "{"}, "must be a JSON object"),
        ({"structured_outputs_config": {"engine": "x"}}, "structured_outputs_config has 'engine', must have"),
    ],
)
def test_argument_is_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate_arguments(given, "demo")


def test_ignored_arguments_are_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        args = EngineArgs("demo", swap_space=4, disable_log_stats=True, enforce_eager=True, max_num_seqs=3)
    assert (args.cuda_graphs, args.max_num_seqs) == (False, 3)
    (record,) = caplog.records
    assert "swap_space (" in record.getMessage()
    assert "disable_log_stats (" in record.getMessage()


def test_llm_refuses_arguments_before_it_reads_the_model() -> None:
    with pytest.raises(ConfigError, match="trust_remote_code is True"):
        LLM("/no/such/model", trust_remote_code=True)


def flag(name: str) -> str:
    return name.replace("_", "-")
