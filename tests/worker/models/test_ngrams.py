"""Qwen4: n-grams across separators, tables in float8, attention without an indexer, and equal bits in any batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference, prompts_of
from safetensors.torch import load_file, save_file
from state_kinds import STATE_KINDS
from state_models import StateModel
from torch import Tensor

from quire.kernels.native.library import is_available
from quire.proto.errors import ModelLoadError

KIND = STATE_KINDS["qwen4_exp_text"]
TABLE = "model.layers.0.ple.ple_embedding"
# Float32 logits differ from those of transformers by up to 5e-5 of the largest one.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folder(make_model: Any) -> Path:
    own: Path = make_model("qwen4_exp_text", seed=7, **KIND)
    return own


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """Copy a model with other tensors and fields of its configuration."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert (own - theirs).abs().max() < TOLERANCE * theirs.abs().max()


def test_ngrams_end_at_separators(folder: Path) -> None:
    """Some of them are the first and the last tokens of chunks, and two follow each other."""
    separator = json.loads((folder / "config.json").read_text())["eos_token_id"]
    prompts = prompts_of([17, 9], seed=3)
    for prompt, places in zip(prompts, ((0, 4, 5, 6, 10, 11, 13), (2, 4, 8)), strict=True):
        for place in places:
            prompt[place] = separator
    model = Reference(folder).model
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    assert_close(StateModel(folder).compute(prompts, [5, 3], 4), expected)


@pytest.mark.parametrize("tp", [1, 2])
def test_table_in_float8_equals_its_dequantized_twin(tp: int, folder: Path, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".ngram_embedding." in name]:
            tensors[name] = (tensors[name] / 0.001).to(torch.float8_e4m3fn)
        tensors[f"{TABLE}.ngram_embedding.weight_scale"] = torch.tensor([0.001])

    def dequantize(tensors: dict[str, Tensor]) -> None:
        quantize(tensors)
        del tensors[f"{TABLE}.ngram_embedding.weight_scale"]
        parts = [f"{TABLE}.ngram_embedding.shard_{index}.weight" for index in range(4)]
        whole = torch.cat([tensors.pop(name) for name in parts])
        tensors[f"{TABLE}.ngram_embedding.weight"] = whole.float() * 0.001

    quantized, twin = (
        rewrite(folder, tmp_path / name, change)
        for name, change in (("float8", quantize), ("twin", dequantize))
    )
    prompts = prompts_of([13, 30], seed=1)
    found, expected = (StateModel(each, tp).compute(prompts, [5, 30], 4) for each in (quantized, twin))
    assert_close(found, expected)
    plain = StateModel(folder, tp).compute(prompts, [5, 30], 4)
    assert (plain[0] - found[0]).abs().max() > TOLERANCE * found[0].abs().max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda own: own[f"{TABLE}.layer_multipliers"].add_(2), "layer_multipliers are other hashes of n-grams"),
        (lambda own: own.pop(f"{TABLE}.ngram_embedding.shard_3.weight"), "no tensor '.*shard_3.weight'"),
        (
            lambda own: own.update({f"{TABLE}.ngram_embedding.shard_3.weight": torch.zeros(100, 12)}),
            "shard_3.weight' ends at row 280, expected 240",
        ),
    ],
)  # fmt: skip
def test_table_of_other_hashes_or_rows_is_refused(
    change: Callable[[dict[str, Tensor]], object], words: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        StateModel(rewrite(folder, tmp_path / "other", change))


def test_attention_without_an_indexer_equals_that_of_one_that_chooses_all(
    make_model: Any, tmp_path: Path
) -> None:
    kind = STATE_KINDS["qwen4_exp_text-all-tokens"]
    source = make_model("qwen4_exp_text", seed=7, **kind)

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".indexer." in name]:
            del tensors[name]

    fields = dict.fromkeys(name for name in kind if name.startswith("indexer_"))
    plain = rewrite(source, tmp_path / "plain", drop, **fields)
    prompts = prompts_of([13, 30], seed=1)
    model = StateModel(plain, 2)
    assert len(model.config.kv_layers) == 1
    model_of_all = Reference(source).model
    with torch.inference_mode():
        expected = [model_of_all(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    assert_close(model.compute(prompts, [5, 30], 4), expected)


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
def test_chunks_and_neighbors_do_not_change_bits(make_model: Any) -> None:
    """The gated delta nets have 32 heads: of other numbers PyTorch computes the last ones otherwise."""
    heads = {"linear_num_value_heads": 32, "linear_value_head_dim": 8}
    model = StateModel(make_model("qwen4_exp_text", seed=7, **KIND | heads))
    prompts = prompts_of([41, 30, 13, 3], seed=1)
    (alone,) = model.compute(prompts[:1], [41], 5)
    for chunk_lens in ([41, 30, 13, 3], [7, 5, 13, 3], [11, 3, 2, 1]):
        assert torch.equal(model.compute(prompts, chunk_lens, 5)[0], alone)
