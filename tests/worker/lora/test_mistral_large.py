"""Adapters of Mistral Large 4, whose checkpoints have other names than the modules of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import put_adapters
from safetensors.torch import save_file
from vision_kinds import VISION_KINDS
from vision_models import (
    MAX_TEXT_TOKEN,
    NO_MEDIA,
    VisionPrompt,
    VisionReference,
    save_model,
)

from quire.proto.config import LoraConfig
from quire.proto.lora import NO_SLOT
from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0, logits_processors=NO_MEDIA)
RANK, SCALING, NUM_TOKENS = 4, 2.0, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistral_large4")
    save_model(VISION_KINDS["mistral_large4"], made, 1)
    return made


def add_adapter(model: torch.nn.Module, folder: Path, kinds: tuple[str, ...], seed: int) -> Path:
    """Add a random update to linear layers of a model, and write it as an adapter of the text model alone."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if (
            not isinstance(module, torch.nn.Linear)
            or name.rpartition(".")[2] not in kinds
            or "vision" in name
        ):
            continue
        num_outputs, num_inputs = module.weight.shape
        a = torch.randn(RANK, num_inputs, generator=generator) / num_inputs**0.5
        b = torch.randn(num_outputs, RANK, generator=generator) * 0.1
        module.weight.data += SCALING * (b @ a)
        key = "base_model.model." + name.replace("language_model.", "")
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    assert len({name.split(".")[-3] for name in tensors}) >= 3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALING, "target_modules": list(kinds)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_give_the_tokens_of_updated_weights(
    tp: int, folder: Path, tmp_path: Path, make_engine: Any, planned: Any
) -> None:
    """Of latents, of queries with rotated numbers, of the output, and of the networks that every token passes."""
    kinds = (
        ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        ("gate_proj", "up_proj", "down_proj"),
    )
    references = [VisionReference(folder) for _ in range(3)]
    paths = [
        add_adapter(reference.model, tmp_path / str(index), own, index)
        for index, (reference, own) in enumerate(zip(references, kinds, strict=False))
    ]
    lora = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)
    engine = make_engine(folder, tp, max_model_len=1024, block_size=8, lora=lora)
    put_adapters(engine, paths)
    rng = random.Random(0)
    sequences = [
        planned([rng.randrange(MAX_TEXT_TOKEN) for _ in range(20)], NUM_TOKENS, GREEDY, lora_slot=slot)
        for slot in (0, 1, NO_SLOT)
    ]
    engine.generate(sequences, chunk_len=13)
    for sequence, reference in zip(sequences, references, strict=True):
        assert len(sequence.generated) == NUM_TOKENS
        prompt = VisionPrompt(sequence.prompt, (), {}, {})
        reference.check_greedy(prompt, sequence.generated)
        if reference is not references[-1]:
            with pytest.raises(AssertionError, match="is more likely than"):
                references[-1].check_greedy(prompt, sequence.generated)
