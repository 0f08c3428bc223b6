"""Tiny model directories that are pooled, in the layouts in which they are published, and their references."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PACKAGE = "sentence_transformers.models"


def as_embedder(
    source: Path, folder: Path, mode: str = "lasttoken", *, normalize: bool = True, **settings: Any
) -> Path:
    """Copy a generator's directory as one of sentence-transformers, with the names of a model without a head.

    Args:
        mode: as the fields of 1_Pooling/config.json name it.
        settings: further fields of config.json.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    bare = {
        name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"
    }
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": index, "name": str(index), "path": paths[index], "type": f"{_PACKAGE}.{kind}"}
        for index, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {
        f"pooling_mode_{each}": False for each in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    pooling = {"word_embedding_dimension": 64, **modes, f"pooling_mode_{mode}": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    change_json(folder / "config.json", **settings)
    return folder


def add_dense(folder: Path, *, seed: int = 0) -> torch.nn.Sequential:
    """Insert two modules Dense after Pooling; return them."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 96), torch.nn.Linear(96, 48, bias=False)
    activations = torch.nn.Tanh(), torch.nn.Identity()
    entries = json.loads((folder / "modules.json").read_text())
    for index, (layer, activation) in enumerate(zip(layers, activations, strict=True), start=2):
        path = f"{index}_Dense"
        (folder / path).mkdir()
        kind = type(activation)
        content: dict[str, Any] = {"in_features": layer.in_features, "out_features": layer.out_features}
        content |= {
            "bias": layer.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__name__}",
        }
        (folder / path / "config.json").write_text(json.dumps(content))
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in layer.named_parameters()}
        save_file(tensors, folder / path / "model.safetensors")
        entries.insert(index, {"idx": index, "name": str(index), "path": path, "type": f"{_PACKAGE}.Dense"})
    (folder / "modules.json").write_text(json.dumps(entries))
    return torch.nn.Sequential(layers[0], activations[0], layers[1], activations[1]).double()


def as_classifier(source: Path, folder: Path, num_labels: int, *, seed: int = 0, **settings: Any) -> Path:
    """Copy a generator's directory as transformers saves a model for sequence classification."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    hidden_size = tensors["model.embed_tokens.weight"].shape[1]
    generator = torch.Generator().manual_seed(seed)
    tensors["score.weight"] = torch.randn(num_labels, hidden_size, generator=generator) / hidden_size**0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    names = {str(index): f"label-{index}" for index in range(num_labels)}
    change_json(
        folder / "config.json",
        architectures=[architecture],
        id2label=names,
        label2id={name: int(index) for index, name in names.items()},
        pad_token_id=0,
        **settings,
    )
    return folder


def as_reranker(source: Path, folder: Path, true_id: int, false_id: int | None) -> Path:
    """Copy a generator's directory as a reranker of sentence-transformers that reads the logits of tokens."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    kinds = [("", "sentence_transformers.base.modules.transformer.Transformer")]
    kinds.append(("1_LogitScore", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"))
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    ids = {"true_token_id": true_id, "false_token_id": false_id}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    return folder


def change_json(path: Path, **settings: Any) -> None:
    """Set fields of a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


class EmbeddingReference:
    """Embeddings as sentence-transformers defines them, from the hidden states of transformers."""

    def __init__(self, source: Path) -> None:
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(source, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(
        self,
        token_ids: list[int],
        mode: str = "lasttoken",
        *,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> np.ndarray:
        hidden = self.model(torch.tensor([token_ids])).last_hidden_state[0].double()
        pooled = {"lasttoken": hidden[-1], "cls_token": hidden[0], "mean_tokens": hidden.mean(0)}[mode]
        pooled = pooled[:dimensions]
        if normalize:
            pooled = pooled / pooled.norm()
        vector: np.ndarray = pooled.numpy()
        return vector
