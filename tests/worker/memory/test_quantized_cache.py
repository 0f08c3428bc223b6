"""Log-probabilities of a text with a quantized KV cache are close to those with a full-precision one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_references import find_reference
from safetensors.torch import load_file, save_file
from stand_in_gpu import installed
from transformers import AutoTokenizer

from quire.proto.step import PromptScoring, RowSampling

TEXT = """It was a bright cold morning, and the old man walked slowly along the river with his dog. He had not slept
well, and he thought of the letter that had come the night before. What could it mean? He had read it three times,
and each time it had seemed to him stranger than before."""
# Mean and largest difference of log-probabilities. Measured: 0.005 and 0.03, 0.02 and 0.07.
TOLERANCE = {"int8": (0.01, 0.08), "fp8_e4m3": (0.04, 0.2)}


def score(engine: Any, planned: Any, token_ids: list[int]) -> np.ndarray[Any, Any]:
    """Return the text's log-probabilities, computed in chunks that read the cache of earlier chunks."""
    sampling = RowSampling(temperature=0.0, scoring=PromptScoring(0, 1, len(token_ids)))
    results = engine.generate([planned(token_ids, 8, sampling)], chunk_len=24)
    scores = [result.prompt_logprobs.logprobs for result in results if result.prompt_logprobs is not None]
    places = np.concatenate([part.index for part in scores])
    assert places.tolist() == list(range(1, len(token_ids)))
    return np.concatenate([part.chosen for part in scores])


@pytest.fixture(scope="module")
def token_ids(demo_model_dir: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(demo_model_dir)(TEXT)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def expected(
    demo_model_dir: Path, make_engine: Any, planned: Any, token_ids: list[int]
) -> np.ndarray[Any, Any]:
    return score(make_engine(demo_model_dir), planned, token_ids)


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("tp", [1, 2])
def test_prompt_logprobs_are_within_tolerance(
    tp: int,
    kv_dtype: str,
    expected: np.ndarray[Any, Any],
    demo_model_dir: Path,
    make_engine: Any,
    planned: Any,
    token_ids: list[int],
) -> None:
    found = score(make_engine(demo_model_dir, tp, kv_dtype=kv_dtype), planned, token_ids)
    differences = np.abs(found - expected)
    mean, largest = TOLERANCE[kv_dtype]
    # The lower bound fails for a cache that is not quantized.
    assert 1e-4 < differences.mean() < mean
    assert differences.max() < largest


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_fixed_scales_are_those_of_the_checkpoint(
    make_model: Any, make_engine: Any, planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under either of their names; a layer without any has 1."""
    folder = shutil.copytree(make_model("llama", num_hidden_layers=3), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    weights["model.layers.0.self_attn.v_scale"] = torch.tensor([0.25])
    weights["model.layers.2.self_attn.k_proj.k_scale"] = torch.tensor(0.125)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with installed(monkeypatch, stand_in=find_reference):
        engine = make_engine(folder, device="cuda", kv_dtype="fp8_per_tensor", cuda_graphs=False)
        engine.generate([planned([5, 17, 99, 3], 4, RowSampling(temperature=0.0))])
        found = [
            [scales[:, part][scales[:, part] > 0].unique().tolist() for part in range(2)]
            for scales in (cache.scales.cpu() for cache in engine.runners[0].memory.kv.cache.layers)
        ]
        engine.close()
    assert found == [[[0.5], [0.25]], [[1.0], [1.0]], [[0.125], [1.0]]]
