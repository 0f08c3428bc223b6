"""The option attention_backend: what it chooses, what it refuses before weights are loaded, and what the log says."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_flashinfer import FakeFlashInfer
from kernel_references import find_reference
from stand_in_gpu import installed

from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.worker.comm.communicator import SingleRank
from quire.worker.libraries.attention_backend import OWN_BACKEND, choose_attention
from quire.worker.libraries.flash_attention import FlashAttention
from quire.worker.libraries.flashinfer import HEAD_DIMS, FlashInfer
from quire.worker.libraries.installed import FLASH_ATTENTION, FLASHINFER, Library
from quire.worker.rank.runner import ModelRunner

GPU = torch.device("cuda", 0)


def install(patch: pytest.MonkeyPatch, *options: str, capability: tuple[int, int] = (9, 0)) -> None:
    """Let libraries be installed, on a GPU of some compute capability."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(Library, "version", property(lambda library: "1.0" if library.option in options else ""))
    patch.setattr(
        FlashInfer, "load", classmethod(lambda cls, device: cls(FakeFlashInfer(), torch.device("cpu")))
    )
    patch.setattr(FlashAttention, "load", classmethod(lambda cls, device: cls(pytest.fail)))


@pytest.fixture
def config(make_model: Any, engine_config: Any) -> EngineConfig:
    """Return the configuration of a model in bfloat16 with heads of 64 numbers."""
    made: EngineConfig = engine_config(
        make_model("llama", head_dim=HEAD_DIMS[0]), device="cuda", dtype="bfloat16"
    )
    return made


def with_backend(config: EngineConfig, backend: str, **parallel: Any) -> EngineConfig:
    return replace(config, parallel=replace(config.parallel, attention_backend=backend, **parallel))


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["flashinfer", "flash_attn"], FlashInfer),
        (["flash_attn"], FlashAttention),
        ([], type(OWN_BACKEND)),
    ],
)
def test_auto_chooses_the_first_that_is_installed(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, options: list[str], chosen: type
) -> None:
    install(monkeypatch, *options)
    assert type(choose_attention(with_backend(config, "auto"), GPU)) is chosen
    assert choose_attention(with_backend(config, "triton"), GPU) is OWN_BACKEND


def test_auto_logs_why_a_library_is_not_used(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "flash_attn", capability=(10, 0))
    with caplog.at_level(logging.INFO, logger="quire"):
        assert choose_attention(with_backend(config, "auto"), GPU) is OWN_BACKEND
    assert "FlashInfer is not used for attention: it is not installed (no module flashinfer)" in caplog.text
    assert "the GPU has compute capability 10.0, it supports 9.0 up to 10.0" in caplog.text


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("llama", {"head_dim": 80}, "the model's heads have 80 numbers"),
        ("llama", {"dtype": "float32"}, "the model's dtype is float32"),
        (
            "llama",
            {"kv_dtype": "int8"},
            "it does not read a KV cache in int8",
        ),
        ("deepseek_v3", {}, "the model has latents or states in place of keys and values"),
        ("llama", {"batch_invariant": True}, "its bits depend on the batch"),
    ],
)
def test_named_library_that_does_not_fit_is_refused(
    make_model: Any,
    engine_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    settings: Any,
    problem: str,
) -> None:
    install(monkeypatch, "flashinfer")
    model = {"head_dim": settings.pop("head_dim", 64)} if kind == "llama" else {}
    settings = {"dtype": "bfloat16", "device": "cuda", **settings}
    config = with_backend(engine_config(make_model(kind, **model), **settings), "flashinfer")
    with pytest.raises(ConfigError, match=f"FlashInfer cannot be used: {problem}"):
        choose_attention(config, GPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
@pytest.mark.parametrize("library", [FLASHINFER, FLASH_ATTENTION], ids=lambda library: library.option)
def test_missing_library_is_refused_before_weights_are_loaded(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    config = with_backend(config, library.option)
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        with pytest.raises(ConfigError, match=f"{library.title} cannot be used: it is not installed"):
            ModelRunner(config, SingleRank(), device=GPU)
        assert gpu.peak == 0


@pytest.mark.parametrize(
    ("num_calls", "unsupported", "logged"),
    [
        (9, set(), "of prompts by FlashAttention 3; Triton kernels of decodes"),
        (9, {"attention sinks"}, "decodes, and of layers with attention sinks"),
        (0, {"attention sinks"}, "Triton kernels; no prompt was computed by FlashAttention 3 yet"),
    ],
)
def test_flash_attention_describes_what_it_computed(
    num_calls: int, unsupported: set[str], logged: str
) -> None:
    attention = FlashAttention(pytest.fail)
    attention.num_calls, attention.unsupported = num_calls, unsupported
    assert attention.describe().endswith(logged)
