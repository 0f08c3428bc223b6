"""A whole rank on the Triton kernels answers with the tokens of a rank on their PyTorch twins."""

from __future__ import annotations

from typing import Any

import pytest
from triton_device import DEVICE

from quire.kernels import decode_splits, dispatch
from quire.proto.step import RowConstraints, RowSampling

SAMPLING = [
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.8, seed=1),
    RowSampling(temperature=1.1, seed=2, top_k=20, top_p=0.9),
    RowSampling(seed=3, constraints=RowConstraints(2, 1.5, 0.5, 0.25, ((7, 2.0),), ((9,), (8, 9, 10)))),
    RowSampling(
        seed=4,
        constraints=RowConstraints(
            3, 0.8, 0.0, -1.0, allowed_token_ids=(3, 7, 200, 350), stop_token_ids=(7,)
        ),
    ),
]
PROMPTS = [[5, 17, 99, 3, 42, 7, 11], [8], list(range(30, 50)), [8, 9], [3, 200, 9]]


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tokens_are_those_of_the_twins(
    make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch, kind: str, device: str
) -> None:
    pytest.importorskip("triton")
    folder = make_model(kind, num_hidden_layers=2, num_key_value_heads=2)

    def generate(device: str) -> list[list[int]]:
        sequences = [
            planned(list(prompt), 4, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)
        ]
        make_engine(folder, device=device).generate(sequences, chunk_len=8)
        return [sequence.generated for sequence in sequences]

    expected = generate("cpu")
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: tensor.is_cuda or device == "cpu")
    assert generate(device) == expected
