"""Checkpoint: the tensors that each rank reads, and the errors for damaged files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.proto.errors import ModelLoadError
from quire.worker.comm.communicator import SingleRank
from quire.worker.rank.runner import ModelRunner
from quire.worker.weights.checkpoint import Checkpoint


@pytest.fixture
def folder(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a model directory that the test may modify."""
    return Path(shutil.copytree(make_model("llama"), tmp_path / "model"))


@pytest.fixture
def load(engine_config: Any) -> Callable[[Path], ModelRunner]:
    return lambda folder: ModelRunner(engine_config(folder), SingleRank())


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard(folder: Path) -> dict[str, str]:
    """Split the single file into two and an index; return tensor |-> file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file_name, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file_name)
    file_of = {name: file_name for file_name, held in halves.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return file_of


def test_directory_without_weights_raises(folder: Path, load: Any) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has no weights: neither model\.safetensors nor"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_file_error_names_file(folder: Path, load: Any, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read \(truncated or damaged\?\)"):
        load(folder)


def test_damaged_header_error_names_file(folder: Path, load: Any) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8:24] = b"x" * 16
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_missing_tensor_error_names_expected_shape(folder: Path, load: Any) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(
        ModelLoadError, match=r"no tensor 'model\.layers\.1\.mlp\.down_proj\.weight'.*\[64, 128\]"
    ):
        load(folder)


def test_unused_tensor_error_names_tensor(folder: Path, load: Any) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}))
    with pytest.raises(ModelLoadError, match=r"1 tensors? that the model does not use: .*q_proj\.bias"):
        load(folder)


def test_computed_constants_are_ignored(folder: Path, load: Any) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(folder)


def test_wrong_shape_error_names_both_shapes(folder: Path, load: Any) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' .* has shape \[65\], expected \[64\]"):
        load(folder)


def test_sharded_checkpoint_gives_same_tokens(
    folder: Path, make_model: Any, make_engine: Any, planned: Any
) -> None:
    from quire.proto.step import RowSampling

    shard(folder)
    sequences = [planned([5, 6, 7], 10, RowSampling(temperature=0.0)) for _ in range(2)]
    for directory, sequence in zip((folder, make_model("llama")), sequences, strict=True):
        make_engine(directory, 2).generate([sequence])
    assert sequences[0].generated == sequences[1].generated


def test_index_with_missing_file_raises(folder: Path, load: Any) -> None:
    shard(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"two\.safetensors cannot be read"):
        load(folder)


def test_index_with_wrong_file_of_tensor_raises(folder: Path, load: Any) -> None:
    file_of = shard(folder)
    file_of["lm_head.weight"] = {"one.safetensors": "two.safetensors"}.get(
        file_of["lm_head.weight"], "one.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    with pytest.raises(
        ModelLoadError, match=r"no tensor 'lm_head\.weight', but model\.safetensors\.index\.json lists it"
    ):
        load(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": "../../etc/passwd"}}']
)
def test_malformed_index_raises(folder: Path, load: Any, text: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        load(folder)


def test_each_rank_reads_only_its_slices(
    make_model: Any, engine_config: Any, thread_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama")
    read: list[tuple[str, int]] = []
    original = Checkpoint.read_into

    def spy(self: Checkpoint, out: torch.Tensor, name: str, *args: Any, **kwargs: Any) -> None:
        read.append((name, out.numel()))
        original(self, out, name, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "read_into", spy)
    whole = {name: tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items()}
    for rank in range(4):
        read.clear()
        ModelRunner(engine_config(folder, 4), thread_group(4).communicator(rank))
        assert {name for name, _ in read} == set(whole)
        for name, count in read:
            assert count == (whole[name] if "norm" in name else whole[name] // 4), name


@pytest.mark.parametrize("size", [1, 4])
def test_progress_counts_bytes_of_own_slices(
    make_model: Any, engine_config: Any, thread_group: Any, size: int
) -> None:
    seen: list[tuple[int, int]] = []
    folder = make_model("qwen2")
    ModelRunner(
        engine_config(folder, size),
        thread_group(size).communicator(size - 1),
        lambda done, total: seen.append((done, total)),
    )
    # Matrices and the biases of q, k and v are split over the ranks; norms are not.
    tensors = load_file(folder / "model.safetensors")
    own = sum(x.nbytes if "norm" in name else x.nbytes // size for name, x in tensors.items())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (own, own)
    assert {total for _, total in seen[:-1]} == {seen[0][1]}
    assert abs(seen[0][1] - own) < 0.02 * own


def test_read_into_converts_to_dtype_of_out(folder: Path, make_model: Any, engine_config: Any) -> None:
    edit(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    checkpoint = Checkpoint(folder)
    out = torch.empty(64)
    checkpoint.read_into(out, "model.norm.weight", (64,))
    expected = load_file(make_model("llama") / "model.safetensors")["model.norm.weight"]
    assert out.dtype == torch.float32
    assert torch.equal(out, expected.bfloat16().float())
