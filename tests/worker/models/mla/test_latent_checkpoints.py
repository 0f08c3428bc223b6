"""Checkpoints of models with latent attention, stored as they are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowing import not_none
from quantized_models import Scheme, write_quantized
from reference import Reference, prompts_of
from safetensors.torch import load_file, save_file

from benchmarks.draft_lengths import fixed_lengths
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.model_source import describe_files
from quire.cluster.offline.llm import LLM
from quire.proto.errors import ModelLoadError
from quire.proto.sampling import SamplingParams
from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0)
# The router stays in full precision.
SCHEME = Scheme("float8", is_float=True, block=(16, 16), ignored=r"mlp\.gate\.|lm_head|embed")


def generate(engine: Any, planned: Any) -> list[list[int]]:
    sequences = [planned(prompt, 10, GREEDY) for prompt in prompts_of([5, 40], seed=3)]
    engine.generate(sequences, chunk_len=16)
    return [sequence.generated for sequence in sequences]


@pytest.fixture(scope="module")
def float8_model(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return a DeepSeek-V3 in float8 with a layer that predicts further tokens, and its twin without."""
    source = make_model("deepseek_v3", seed=3)
    folder, twin = write_quantized(source, tmp_path_factory.mktemp("float8"), SCHEME)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert tensors["model.layers.1.self_attn.kv_b_proj.weight"].dtype == torch.float8_e4m3fn
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    extra = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in last.items()}
    extra["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors | extra, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder, twin


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_float8_checkpoint_gives_tokens_of_dequantized_weights(
    tp: int, float8_model: tuple[Path, Path], make_engine: Any, planned: Any
) -> None:
    folder, twin = float8_model
    assert generate(make_engine(folder, tp), planned) == generate(make_engine(twin, 1), planned)


def test_layers_beyond_the_configuration_are_refused(
    float8_model: tuple[Path, Path], make_engine: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(float8_model[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match=r"tensors that the model does not use: model\.layers\.3"):
        make_engine(folder)


def test_kimi_k2_is_read_as_deepseek_v3(
    make_model: Callable[..., Path], make_engine: Any, tmp_path: Path
) -> None:
    """Its model type is not known to transformers, but its architecture is; its own code is not run."""
    source = make_model("deepseek_v3", seed=7, n_group=1, topk_group=1)
    folder = Path(shutil.copytree(source, tmp_path / "kimi"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert describe_files(EngineOptions(str(folder))).latent_dim == 64
    (prompt,) = prompts_of([20], seed=5)
    (generated,) = make_engine(folder).greedy([prompt], 8)
    Reference(source).check_greedy(prompt, generated)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_quantized_cache_gives_the_same_first_tokens(
    kind: str, make_model: Callable[..., Path], make_engine: Any, planned: Any
) -> None:
    folder = make_model(kind, seed=7)
    exact = generate(make_engine(folder), planned)
    found = generate(make_engine(folder, 2, kv_dtype="int8"), planned)
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in exact]


def test_head_of_multi_token_prediction_drafts_with_latents(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The appended layer has latents of its own, in the blocks of the others."""
    source = make_model("deepseek_v3", seed=7)
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    tensors = load_file(source / "model.safetensors")
    names = [name for name in tensors if name.startswith("model.layers.2.")]
    added = {name.replace("layers.2.", "layers.3."): tensors[name].clone() for name in names}
    added |= {
        f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    added["model.layers.3.eh_proj.weight"] = torch.randn(64, 128) / 128**0.5
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=64, speculative_config=drafts) as llm:
        with fixed_lengths(2):
            results = llm.generate(prompts_of([5, 30], seed=2), params)
        assert llm._engine.scheduler.stats.num_draft_tokens > 0  # type: ignore[attr-defined]
    reference = Reference(source)
    for result in results:
        reference.check_greedy(not_none(result.prompt_token_ids), result.outputs[0].token_ids)
