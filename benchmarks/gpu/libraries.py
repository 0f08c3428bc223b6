"""Attention by the installed libraries, beside that of quire in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.op_case import MakeOp, Op
from quire.kernels.attention_variant import PLAIN, AttentionVariant
from quire.kernels.latent_attention import ChunkBounds
from quire.worker.attention import AttentionInputs, LayerCache, paged_attention
from quire.worker.libraries.attention_backend import BACKENDS, AttentionBackend
from quire.worker.libraries.flashinfer import FlashInfer


def installed_libraries(device: str) -> list[str]:
    """Return the libraries that fit the device, by their option."""
    if torch.device(device).type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    return [each.library.option for each in BACKENDS if not each.library.find_problem(capability)]


# Index of a set of inputs |-> queries, a layer's cache and the inputs of a step.
MakeStep = Callable[[int], tuple[Tensor, Tensor, AttentionInputs]]


def attention_peers(
    device: str, scale: float, make: MakeStep, variant: AttentionVariant = PLAIN
) -> dict[str, MakeOp]:
    """Return an op by each library that is installed; its plan is made before, as that of a whole step is."""

    def make_op(option: str, index: int) -> Op:
        q, cache, inputs = make(index)
        inputs = _backend(option, device).begin_step(inputs)
        return partial(paged_attention, q, LayerCache(cache), inputs, scale, variant)

    return {option: partial(make_op, option) for option in installed_libraries(device)}


def latent_peers(device: str, scale: float, value_dim: int, make: MakeStep) -> dict[str, MakeOp]:
    """Return the decodes of latents by FlashInfer, if it is installed; see attention_peers."""

    def make_op(index: int) -> Op:
        q, cache, inputs = make(index)
        inputs = _backend(FlashInfer.library.option, device).begin_step(inputs)
        return partial(inputs.library.decode_latents, q, LayerCache(cache), inputs, scale, value_dim)

    return {name: make_op for name in installed_libraries(device) if name == FlashInfer.library.option}


def _backend(option: str, device: str) -> AttentionBackend:
    backend = next(each for each in BACKENDS if each.library.option == option)
    return backend.load(torch.device(device))


def decode_inputs(tables: Tensor, lens: Tensor) -> AttentionInputs:
    """Return the inputs of a step of decodes."""
    starts = torch.zeros(1, dtype=torch.int32, device=lens.device)
    return AttentionInputs(
        len(lens),
        torch.zeros(len(lens), dtype=torch.int64, device=lens.device),
        tables,
        starts,
        lens,
        chunks=ChunkBounds([], []),
        decode_lens=lens.cpu().numpy(),
    )


def prefill_inputs(tables: Tensor, length: int) -> AttentionInputs:
    """Return the inputs of a step that computes one prompt."""
    starts = torch.tensor([0, length], dtype=torch.int32, device=tables.device)
    return AttentionInputs(
        0,
        torch.zeros(length, dtype=torch.int64, device=tables.device),
        tables,
        starts,
        starts[1:].clone(),
        chunks=ChunkBounds([length], [length]),
        decode_lens=np.empty(0, np.int32),
    )
