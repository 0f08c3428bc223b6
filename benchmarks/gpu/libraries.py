"""Attention by the installed libraries, beside that of quire in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.op_case import Op
from quire.kernels.latent_attention import ChunkBounds
from quire.worker.attention import AttentionInputs, LayerCache, paged_attention
from quire.worker.libraries.attention_backend import BACKENDS


def installed_libraries(device: str) -> list[str]:
    """Return the libraries that fit the device, by their option."""
    if torch.device(device).type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    return [each.library.option for each in BACKENDS if not each.library.find_problem(capability)]


def attention_peers(
    device: str, scale: float, make: Callable[[int], tuple[Tensor, Tensor, AttentionInputs]]
) -> dict[str, Callable[[int], Op]]:
    """Return an op by each library that is installed; its plan is made before, as that of a whole step is.

    Args:
        make: returns queries, a layer's cache and the inputs of a step.
    """

    def make_op(option: str, index: int) -> Op:
        backend = next(each for each in BACKENDS if each.library.option == option).load(torch.device(device))
        q, cache, inputs = make(index)
        return partial(paged_attention, q, LayerCache(cache), backend.begin_step(inputs), scale)

    return {option: partial(make_op, option) for option in installed_libraries(device)}


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
