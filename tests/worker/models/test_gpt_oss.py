"""gpt-oss as published: experts in MXFP4, stacked, the rows of gate and up alternating."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference, prompts_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.kernels.quantized_linear import FLOAT4_NUMBERS
from quire.proto.errors import ConfigError
from quire.proto.model.registry import check_supported
from quire.proto.step import RowSampling
from quire.worker.weights import linear_weight

GREEDY = RowSampling(temperature=0.0)


def quantize(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize [X, K, N] to blocks [X, N, K / 32, 16], scales [X, N, K / 32], and the numbers that they stand for."""
    groups = stack.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(dim=3) / 6).log2().ceil()
    powers = exponents.exp2().unsqueeze(-1)
    numbers = torch.tensor(FLOAT4_NUMBERS)
    codes = ((groups / powers).unsqueeze(-1) - numbers).abs().argmin(dim=-1).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    dequantized = (numbers[codes.int()] * powers).flatten(2).transpose(1, 2)
    return blocks, (exponents + 127).to(torch.uint8), dequantized.contiguous()


@pytest.fixture(scope="module")
def folders(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the model as published, and its twin of dequantized weights."""
    source = make_model("gpt_oss", seed=7)
    folder = tmp_path_factory.mktemp("gpt-oss")
    published, twin = folder / "published", folder / "twin"
    tensors = load_file(source / "model.safetensors")
    stored, dequantized = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, dequantized[name] = quantize(stored.pop(name))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for copy, content in ((published, stored), (twin, dequantized)):
        shutil.copytree(source, copy)
        save_file(content, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (published / "config.json").write_text(json.dumps(config))
    return published, twin


@pytest.mark.parametrize(
    ("tp", "settings"), [(1, {}), (2, {}), (4, {}), (4, {"enable_expert_parallel": True})], ids=str
)
def test_published_model_gives_tokens_of_dequantized_weights(
    tp: int, settings: dict[str, Any], folders: tuple[Path, Path], make_engine: Any, planned: Any
) -> None:
    published, twin = folders
    reference = Reference(twin)
    sequences = [planned(prompt, 12, GREEDY) for prompt in prompts_of([5, 41], seed=1)]
    make_engine(published, tp, block_size=8, **settings).generate(sequences, chunk_len=16)
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_quantized_kernel_gives_tokens_of_dequantized_weights(
    expert_parallel: bool,
    folders: tuple[Path, Path],
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The experts stay in MXFP4 as on a GPU; the kernel's PyTorch twin multiplies."""
    monkeypatch.setattr(linear_weight, "has_quantized_kernel", lambda weight: True)
    published, twin = folders
    (prompt,) = prompts_of([9], seed=2)
    (generated,) = make_engine(published, 2, enable_expert_parallel=expert_parallel).greedy([prompt], 8)
    Reference(twin).check_greedy(prompt, generated)


def test_more_ranks_than_groups_of_an_expert_raise(folders: tuple[Path, Path], engine_config: Any) -> None:
    model = engine_config(folders[0]).model
    check_supported(model, 4)
    with pytest.raises(ConfigError, match="intermediate size of experts, 128, is too small"):
        check_supported(model, 8)


def test_ranks_with_whole_experts_may_be_more_than_groups_of_an_expert(
    folders: tuple[Path, Path], engine_config: Any
) -> None:
    model = engine_config(folders[0]).model
    model = replace(model, num_kv_heads=8, hf=model.hf | {"num_local_experts": 8, "num_key_value_heads": 8})
    check_supported(model, 8, expert_parallel=True)
