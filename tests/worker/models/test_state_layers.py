"""Layers that keep a state: logits equal transformers' at any chunk length, in mixed batches, on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_kinds import model_type_of
from reference import Reference, prompts_of
from state_kinds import STATE_KINDS
from state_models import StateModel

# float32 logits differ from those of transformers by up to 2e-5 of the largest one.
TOLERANCE = 2e-4
LENGTHS, CHUNK_LENS, NUM_DECODES = [13, 30, 3, 41], [5, 7, 1, 41], 4


@pytest.fixture(scope="module")
def references(make_model: Any) -> Any:
    """`references(kind) -> folder, logits of each prompt in transformers`; cached."""
    made: dict[str, tuple[Path, list[torch.Tensor]]] = {}

    def reference(kind: str) -> tuple[Path, list[torch.Tensor]]:
        if kind not in made:
            folder = make_model(model_type_of(kind), seed=7, **STATE_KINDS[kind])
            model = Reference(folder).model
            with torch.inference_mode():
                logits = [
                    model(torch.tensor([prompt]), use_cache=False).logits[0]
                    for prompt in prompts_of(LENGTHS, seed=1)
                ]
            made[kind] = folder, logits
        return made[kind]

    return reference


@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_logits_equal_transformers(kind: str, tp: int, references: Any) -> None:
    folder, expected = references(kind)
    model = StateModel(folder, tp)
    found = model.compute(prompts_of(LENGTHS, seed=1), CHUNK_LENS, NUM_DECODES)
    for own, theirs in zip(found, expected, strict=True):
        assert (own - theirs).abs().max() < TOLERANCE * theirs.abs().max()
