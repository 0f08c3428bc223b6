"""Stage `smoke`: each kernel once at serving shapes beside its reference, a tiny model with graphs on and off."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import op_case, ops
from benchmarks.gpu.op_case import OpCase
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.record import Record
from benchmarks.gpu.server import Server
from benchmarks.gpu.sizes import TINY, Sizes
from quire.kernels import dispatch
from quire.kernels.dispatch import num_compilations

# Between the rows of the kernel's inputs; those of the reference are dense. A multiple of 16 keeps the alignment.
ROW_GAP = 16
NUM_TOKENS = 24
# A comparison needs about this long, with the compilation.
OP_S = 2.0
_PROMPT_LENS = (5, 1, 70, 33)


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    with torch.inference_mode():
        for case in ops.cases(sizes):
            if record.begins(case.name, OP_S):
                with record.case(case.name):
                    compare_with_twin(case)
                    record.notes.setdefault("passed", []).append(case.name)
    record.add("smoke.compilations", num_compilations(), "", "of kernels, for these shapes")
    with tempfile.TemporaryDirectory() as model:
        write_llama(Path(model), TINY, sizes.dtype, sizes.device)
        with record.case("tiny model"):
            _compare_graphs(record, Path(model), sizes)


def compare_with_twin(case: OpCase) -> None:
    """Run an op on the device, and its PyTorch reference on inputs of equal numbers and other strides there.

    Raises:
        AssertionError: an output, or an input that is overwritten, differs by more than the case's tolerance.
    """
    found = _results(case, uses_twin=False)
    torch.accelerator.synchronize() if case.device == "cuda" else None
    expected = _results(case, uses_twin=True)
    for index, (ours, references) in enumerate(zip(found, expected, strict=True)):
        error = _relative_error(ours, references)
        assert error <= case.tolerance, f"output {index} has the relative error {error:.3g}"


def _results(case: OpCase, uses_twin: bool) -> list[Tensor]:
    torch.manual_seed(0)
    is_kernel = not uses_twin and dispatch.has_kernels(torch.empty(0, device=case.device))
    with patch.object(op_case, "row_gap", ROW_GAP if is_kernel else 0):
        op = case.make(0)
    with patch.object(dispatch, "has_kernels", lambda tensor: False) if uses_twin else nullcontext():
        found: Any = op()
    return [found] if isinstance(found, Tensor) else [each for each in found if isinstance(each, Tensor)]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, f"the shapes are {list(found.shape)} and {list(expected.shape)}"
    if not expected.dtype.is_floating_point:
        return float((found != expected).double().mean())
    found, expected = found.double(), expected.double()
    assert not found.isnan().any(), "it has NaN"
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite()), "other numbers are finite"
    found, expected = found[finite], expected[finite]
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


def _compare_graphs(record: Record, model: Path, sizes: Sizes) -> None:
    """Compare the tokens of a model with graphs, without, and with each kind of cache."""
    variants: dict[str, dict[str, Any]] = {
        "graphs": {},
        "eager": {"cuda_graphs": False},
        "one_step": {"max_steps_in_flight": 1},
        "int8_kv": {"kv_cache_dtype": "int8"},
        "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
        "host_tier": {"num_host_kv_blocks": 16},
        "fp8": {"quantization": "fp8"},
        "int8": {"quantization": "int8"},
    }
    tokens: dict[str, list[list[int]]] = {}
    for name, options in variants.items():
        with record.case(f"tiny model, {name}"):
            started = time.perf_counter()
            tokens[name] = generate(model, sizes, {"num_kv_blocks": 128, "max_num_seqs": 8, **options})
            record.add(f"smoke.tiny.{name}_s", time.perf_counter() - started, "s", "load, generate and close")
    for name in ("eager", "one_step", "host_tier"):
        with record.case(f"tokens, {name}"):
            assert tokens[name] == tokens["graphs"], f"{tokens[name]} differ from {tokens['graphs']}"


def generate(model: Path, sizes: Sizes, options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a few prompts by an engine that is closed afterwards."""
    server = Server(model, device=sizes.device, dtype=sizes.dtype, **options)
    try:
        rng = np.random.default_rng(0)
        handles = [server.submit(rng.integers(1, TINY.vocab_size, n), NUM_TOKENS) for n in _PROMPT_LENS]
        server.drain()
        return [server.tokens[handle] for handle in handles]
    finally:
        server.close()
