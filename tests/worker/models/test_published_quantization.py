"""Published quantized checkpoints: greedy tokens of two ranks equal those of the dequantized weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from published_checkpoints import CHECKPOINTS, write_published
from reference import prompts_of
from safetensors.torch import load_file, save_file

from quire.proto.errors import ConfigError


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_checkpoint_gives_tokens_of_dequantized_weights(
    name: str, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    published = CHECKPOINTS[name]
    source = make_model(published.kind, seed=3, **published.overrides)
    quantized, twin = write_published(source, tmp_path, published)
    generated = []
    for folder, tp in ((quantized, 2), (twin, 1)):
        generated.append(make_engine(folder, tp).greedy(prompts_of([5, 30], seed=3), 10, chunk_len=16))
    assert generated[0] == generated[1]
    assert len(set(generated[0][0] + generated[0][1])) > 4


def test_experts_that_are_quantized_as_a_stack_are_refused_by_name(
    make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    """As NVIDIA's Model Optimizer stores those of Llama 4."""
    folder = Path(shutil.copytree(make_model("llama4_text"), tmp_path / "modelopt"))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        stack = tensors[name]
        tensors[name] = torch.zeros(stack.shape[0], stack.shape[1] // 2, stack.shape[2], dtype=torch.uint8)
        tensors[f"{name}_weight_scale"] = torch.ones(stack.shape[0], stack.shape[1] // 16, stack.shape[2]).to(
            torch.float8_e4m3fn
        )
        tensors[f"{name}_weight_scale_2"] = torch.ones(())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["*self_attn*"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"quantized experts in one stack .* take a checkpoint that stores each"
    ):
        make_engine(folder)
