"""Quantized checkpoints for tests, written by benchmarks/quantized_checkpoints.py, and full-precision twins."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_PATH = Path(__file__).parents[2] / "benchmarks" / "quantized_checkpoints.py"


def _load() -> Any:
    """Load the module by its path, since the repository's root must not be on sys.path."""
    spec = importlib.util.spec_from_file_location("quantized_checkpoints", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


checkpoints = _load()
Scheme = checkpoints.Scheme
# Schemes that models are compared with their dequantized twins in.
SCHEMES = {
    "gptq": Scheme("gptq"),
    "gptq-symmetric": Scheme("gptq", symmetric=True),
    "gptq-one-group": Scheme("gptq", group_len=None),
    "gptq-act-order": Scheme("gptq", act_order=True),
    "gptq-8-bits": Scheme("gptq", bits=8),
    "gptq-uneven-groups": Scheme("gptq", group_len=48),
    "awq": Scheme("awq"),
    "packed": Scheme("packed"),
    "packed-symmetric": Scheme("packed", symmetric=True),
    "packed-act-order": Scheme("packed", act_order=True),
    "packed-8-bits": Scheme("packed", bits=8, group_len=None, symmetric=True),
    "int8": Scheme("codes", bits=8, group_len=None, symmetric=True),
    "int8-groups-and-zeros": Scheme("codes", bits=8),
    "float8": Scheme("codes", is_float=True, group_len=None),
    "float8-blocks": Scheme("float8", is_float=True, block=(48, 32)),
    "nvfp4": Scheme("nvfp4", group_len=16, is_float=True),
    "mxfp4": Scheme("mxfp4", is_float=True),
    "modelopt-nvfp4": Scheme("modelopt", group_len=16, is_float=True),
    "modelopt-fp8": Scheme("modelopt", group_len=None, is_float=True, block=(512, 512)),
    "modelopt-fp8-channels": Scheme("modelopt", group_len=None, is_float=True),
    "modelopt-fp8-blocks": Scheme("modelopt", group_len=None, is_float=True, block=(128, 128)),
    "some-layers-left": Scheme("awq", ignored=r"layers\.1\.|k_proj|down_proj"),
}


def write_quantized(source: Path, folder: Path, scheme: Any) -> tuple[Path, Path]:
    """Write the model quantized by the scheme, and a twin with the dequantized weights in float32."""
    quantized, twin = folder / "quantized", folder / "twin"
    dequantized = checkpoints.write_checkpoint(source, quantized, scheme)
    assert dequantized, "nothing was quantised"
    shutil.copytree(source, twin)
    tensors = load_file(source / "model.safetensors")
    assert dequantized.keys() <= tensors.keys()
    replaced = {name: weight.to(torch.float32) for name, weight in dequantized.items()}
    save_file(tensors | replaced, twin / "model.safetensors", metadata={"format": "pt"})
    return quantized, twin
