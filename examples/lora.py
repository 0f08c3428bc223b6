"""LoRA adapters: several of them in one batch. `python examples/lora.py [MODEL NAME=PATH ...]`.

Without arguments, two small random adapters of the demo model are written to a temporary folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams

PROMPT = "The sea was"
# Outputs and inputs of the demo model's query projections.
SHAPE, NUM_LAYERS = (256, 256), 4


def write_random_adapter(folder: Path, seed: int, rank: int = 4) -> None:
    """Write an adapter of the query projections in PEFT's layout."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, SHAPE[1], generator=generator) / 16
        tensors[f"{module}.lora_B.weight"] = torch.randn(SHAPE[0], rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with tempfile.TemporaryDirectory() as folder:
        paths = dict(argument.split("=", 1) for argument in sys.argv[2:])
        if not paths:
            for seed, name in enumerate(("red", "blue")):
                write_random_adapter(Path(folder, name), seed)
                paths[name] = str(Path(folder, name))
        adapters = [LoRARequest(name, 1, path) for name, path in paths.items()]
        with LLM(model, num_kv_blocks=256, enable_lora=True, max_loras=len(adapters)) as llm:
            params = SamplingParams(max_tokens=16, temperature=0.0)
            requests = [None, *adapters]
            outputs = llm.generate([PROMPT] * len(requests), params, lora_request=requests)
            for request, output in zip(requests, outputs, strict=True):
                name = "no adapter" if request is None else request.lora_name
                print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
