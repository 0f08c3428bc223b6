"""Muse Spark with adapters, with quantized layers, and with its experts on ranks."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merge, put_adapters, write_adapter
from quantized_models import SCHEMES, write_quantized
from safetensors.torch import load_file, save_file
from vision_kinds import VISION_KINDS
from vision_models import (
    MAX_TEXT_TOKEN,
    NO_MEDIA,
    VisionPrompt,
    VisionReference,
    save_model,
)

from quire.proto.config import LoraConfig
from quire.proto.errors import ConfigError
from quire.proto.lora import NO_SLOT, LoraLoad
from quire.proto.step import RowSampling
from quire.worker.models.moe.expert_layers import ExpertLayers
from quire.worker.models.moe.moe import MixtureOfExperts

GREEDY = RowSampling(temperature=0.0, logits_processors=NO_MEDIA)
LORA = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("muse_spark")
    save_model(VISION_KINDS["muse_spark"], made, 3)
    return made


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(MAX_TEXT_TOKEN) for _ in range(20 + index)] for index in range(count)]


def of_text_model(adapter: Path) -> Path:
    """Name the modules of an adapter as those of a text model alone; return its folder."""
    file = adapter / "adapter_model.safetensors"
    tensors = {name.replace(".language_model.", "."): each for name, each in load_file(file).items()}
    save_file(tensors, file)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace("language_model.", ""))
    return adapter


def check(folder: Path, prompt: list[int], generated: list[int], tie: float = 3e-4) -> None:
    assert len(generated) == NUM_TOKENS
    VisionReference(folder).check_greedy(VisionPrompt(prompt, (), {}, {}), generated, tie)


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_give_the_tokens_of_merged_weights(
    tp: int, folder: Path, tmp_path: Path, make_engine: Any, planned: Any
) -> None:
    """Of attention with its gates, of the router, of dense networks and of experts."""
    adapters = [
        write_adapter(tmp_path / "first", folder, ("o_proj", "gate_proj", "gate"), seed=1),
        write_adapter(tmp_path / "second", folder, ("gate_up_proj", "up_proj", "down_proj"), rank=3, seed=2),
    ]
    merged = [merge(tmp_path / f"merged{index}", folder, own) for index, own in enumerate(adapters)]
    engine = make_engine(folder, tp, max_model_len=1024, block_size=8, lora=LORA)
    put_adapters(engine, [of_text_model(own) for own in adapters])
    slots = [0, 1, NO_SLOT]
    sequences = [
        planned(prompt, NUM_TOKENS, GREEDY, lora_slot=slot)
        for prompt, slot in zip(prompts(3), slots, strict=True)
    ]
    engine.generate(sequences, chunk_len=13)
    for sequence, own in zip(sequences, [*merged, folder], strict=True):
        check(own, sequence.prompt, sequence.generated)


def test_adapter_of_projections_around_experts_is_refused_by_name(
    folder: Path, tmp_path: Path, make_engine: Any
) -> None:
    path = write_adapter(tmp_path / "adapter", folder, ("post_expert_proj",))
    store = make_engine(folder, max_model_len=1024, lora=LORA).runners[0].memory.loaded.adapters.store
    store.load(LoraLoad(0, str(of_text_model(path))))
    (report,) = store.take_reports(60)
    assert "layers.0.mlp.post_expert_proj" in report.error


@pytest.mark.parametrize(("scheme", "tp"), [("packed", 1), ("float8-blocks", 2)])
def test_quantized_layers_give_the_tokens_of_dequantized_ones(
    scheme: str, tp: int, folder: Path, tmp_path: Path, make_engine: Any, planned: Any
) -> None:
    ignored = "vision|audio"
    quantized, twin = write_quantized(folder, tmp_path, replace(SCHEMES[scheme], ignored=ignored))
    engine = make_engine(quantized, tp, max_model_len=1024, language_model_only=True)
    sequences = [planned(prompt, NUM_TOKENS, GREEDY) for prompt in prompts(3)]
    engine.generate(sequences)
    for sequence in sequences:
        check(twin, sequence.prompt, sequence.generated)


def test_ranks_hold_whole_experts(folder: Path, make_engine: Any) -> None:
    """A norm reads the whole result of an expert."""
    engine = make_engine(folder, 2, max_model_len=1024, language_model_only=True)
    mixture = next(
        layer.mlp
        for layer in engine.runners[1].memory.loaded.model.layers
        if isinstance(layer.mlp, MixtureOfExperts)
    )
    experts = mixture.experts
    assert isinstance(experts, ExpertLayers)
    assert experts.first_expert == mixture.spec.count // 2
    assert len(experts.down) == mixture.spec.count // 2
    assert experts.down[0].multiply(torch.ones(1, mixture.spec.intermediate_size)).shape[1] == (
        mixture.spec.latent_size
    )


def test_fewer_experts_than_ranks_are_refused(folder: Path, tmp_path: Path, make_engine: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_local_experts"] = 2
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has 2 experts, too few for one on each of 4 ranks; use a"):
        make_engine(tmp_path, 4, max_model_len=1024)


def test_rounded_weights_give_nearly_the_same_logits(
    folder: Path, tmp_path: Path, make_engine: Any, planned: Any
) -> None:
    """Gates of the residual and routers stay in float32. Tokens have all experts: no rounding chooses another one."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts_per_tok"] = config["text_config"]["num_local_experts"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = make_engine(tmp_path, max_model_len=1024, dtype="bfloat16", language_model_only=True)
    model = engine.runners[0].memory.loaded.model
    mixture = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts))
    assert mixture.router.weight.weight.dtype == torch.float32
    sequences = [planned(prompt, NUM_TOKENS, GREEDY) for prompt in prompts(3)]
    engine.generate(sequences)
    for sequence in sequences:
        check(tmp_path, sequence.prompt, sequence.generated, tie=0.2)
