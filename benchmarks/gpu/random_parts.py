"""LoRA adapters and a draft head for a Llama of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.checkpoints import Shapes, random_weight, write_checkpoint
from benchmarks.gpu.random_llama import layer_projections, llama_config
from benchmarks.gpu.sizes import ModelShape, Sizes


def write_adapter(folder: Path, sizes: Sizes) -> None:
    """Write an adapter of every projection in PEFT's layout."""
    tensors = {}
    dtype, rank = getattr(torch, sizes.dtype), sizes.adapter_rank
    projections = layer_projections(sizes.model, sizes.model.hidden_size)
    for layer in range(sizes.model.num_hidden_layers):
        for name, (rows, columns) in projections.items():
            for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
                tensors[key] = random_weight(side, shape, dtype, sizes.device)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [name.partition(".")[2] for name in projections]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_eagle3(folder: Path, sizes: Sizes) -> None:
    """Write an EAGLE-3 head of the run's Llama, whose vocabulary it shares."""
    shape = sizes.model
    layers = shape.num_hidden_layers
    ids = [2, layers // 2, layers - 3] if layers > 5 else [0, layers // 2, layers]
    config = llama_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids},
    }
    write_checkpoint(folder, config, _head_shapes(shape), sizes.dtype, sizes.device)


def _head_shapes(shape: ModelShape) -> Shapes:
    hidden = shape.hidden_size
    yield "fc.weight", (hidden, 3 * hidden)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"midlayer.{name}.weight", (hidden,)
    for name, size in layer_projections(shape, 2 * hidden).items():
        yield f"midlayer.{name}.weight", size
    yield "norm.weight", (hidden,)
