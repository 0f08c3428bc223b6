"""Text models load from checkpoints that also have models for images, with the published names, in shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import KINDS
from reference import Reference, prompts_of
from safetensors.torch import load_file, save_file
from state_kinds import STATE_KINDS

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.model_config import describe_model
from quire.cluster.config.resolve import resolve
from quire.proto.errors import ConfigError

# Model type of the text model |-> that of the published model, its architecture, and prefixes of text model and head.
PUBLISHED = {
    "llama4_text": (
        "llama4",
        "Llama4ForConditionalGeneration",
        "language_model.model.",
        "language_model.lm_head.",
    ),
    "gemma3_text": ("gemma3", "Gemma3ForConditionalGeneration", "language_model.model.", ""),
    "gemma3n_text": ("gemma3n", "Gemma3nForConditionalGeneration", "model.language_model.", ""),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.", "lm_head."),
    "qwen4_exp_text": (
        "qwen4_exp",
        "Qwen4ExpForConditionalGeneration",
        "model.language_model.",
        "lm_head.",
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        "model.language_model.",
        "lm_head.",
    ),
    "gemma4_text": ("gemma4", "Gemma4ForConditionalGeneration", "model.language_model.", "lm_head."),
    "mistral": (
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "language_model.model.",
        "language_model.lm_head.",
    ),
    "deepseek_v3": (
        "kimi_k25",
        "KimiK25ForConditionalGeneration",
        "language_model.model.",
        "language_model.lm_head.",
    ),
    "mistral4": (
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "language_model.model.",
        "language_model.lm_head.",
    ),
    "gemma4_unified_text": (
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        "model.language_model.",
        "lm_head.",
    ),
    "ministral3": (
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "language_model.model.",
        "language_model.lm_head.",
    ),
}


def publish(source: Path, folder: Path, kind: str) -> None:
    """Write a text model as part of a model for images, in three shards, without the head if it has no prefix."""
    model_type, architecture, body, head = PUBLISHED[kind]
    shutil.copytree(source, folder)
    stored = load_file(source / "model.safetensors")
    tensors = {"vision_tower.patch.weight": torch.zeros(3, 4), "multi_modal_projector.bias": torch.zeros(5)}
    for name, tensor in stored.items():
        if not name.startswith("lm_head."):
            tensors[body + name.removeprefix("model.").removeprefix("language_model.")] = tensor
        elif head:
            tensors[head + name.removeprefix("lm_head.")] = tensor
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), dict[str, str]()
    for shard in range(3):
        own, file = names[shard::3], f"model-{shard + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file)
        files |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    text = json.loads((source / "config.json").read_text())
    del text["architectures"]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "dtype": text.pop("dtype"),
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_text_model_of_published_checkpoint_equals_transformers(
    kind: str, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    has_head = bool(PUBLISHED[kind][3])
    source = make_model(kind, seed=7, tie_word_embeddings=not has_head, **(KINDS | STATE_KINDS)[kind])
    publish(source, tmp_path / "published", kind)
    engine = make_engine(tmp_path / "published", 2)
    assert engine.config.model.architecture.endswith("ForCausalLM")
    reference = Reference(source)
    for prompt in prompts_of([5, 33], seed=6):
        (generated,) = engine.greedy([prompt], 10, chunk_len=16)
        reference.check_greedy(prompt, generated)


def test_other_text_models_are_refused(tmp_path: Path) -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {"model_type": "mixtral"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "served with a text model of type mistral, ministral3 or mistral4, not 'mixtral'"
    with pytest.raises(ConfigError, match=words):
        describe_model(tmp_path, "it")


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        ("phimoe", {"architectures": ["PhiMoEForCausalLM"]}),
        ("qwen2", {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}),
    ],
)
def test_published_names_of_transformers_models_are_known(
    kind: str, published: dict[str, Any], make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    """The repositories have code of their own, which is not run, and transformers has other names."""
    source = make_model(kind, seed=7, **(KINDS | STATE_KINDS)[kind])
    folder = Path(shutil.copytree(source, tmp_path / "published"))
    config = json.loads((folder / "config.json").read_text())
    code = {
        "auto_map": {"AutoConfig": "configuration_it.ItConfig", "AutoModelForCausalLM": "it.ItForCausalLM"}
    }
    (folder / "config.json").write_text(json.dumps(config | published | code))
    resolve(EngineOptions(str(folder), device="cpu"), Machine(1, 0))
    (prompt,) = prompts_of([20], seed=5)
    (generated,) = make_engine(folder).greedy([prompt], 8)
    Reference(source).check_greedy(prompt, generated)
