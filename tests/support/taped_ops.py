"""Ops and collectives that a TapeBackend records, as those of a GPU, where a CPU's run in C++ or read values back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tape import on_one_launch
from torch import Tensor

from quire.kernels import latent_attention, linear, lora, paged_attention
from quire.kernels.native import ops as cpu
from quire.worker import attention
from quire.worker.lora import embedding_adapters, layers
from quire.worker.models.mixers import mla as latent_layer


def decode(q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """Behave as the kernel, which treats rows of length 0 as padding."""
    out, live = torch.zeros_like(q), seq_lens > 0
    if live.any():
        out[live] = paged_attention.paged_decode_attention(
            q[live], kv_cache, block_tables[live], seq_lens[live], scale
        )
    return out


def prefill(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, query_start: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """Behave as the kernel, which gives any numbers for tokens outside all chunks."""
    out = paged_attention.paged_prefill_attention(q, kv_cache, block_tables, query_start, seq_lens, scale)
    out[int(query_start[-1]) :] = torch.nan
    return out


def latent_decode(
    q: Tensor, latents: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float, value_dim: int
) -> Tensor:
    """Behave as the kernel, which gives any numbers for rows of length 0."""
    out, live = q.new_full((*q.shape[:2], value_dim), torch.nan), seq_lens > 0
    if live.any():
        out[live] = latent_attention.latent_decode_attention(
            q[live], latents, block_tables[live], seq_lens[live], scale, value_dim
        )
    return out


def adapted(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    part_starts: Tensor,
    order: Tensor,
    starts: Tensor,
    slots: Tensor,
) -> Tensor:
    """Return what add_lora writes to y; no launch of a kernel returns tensors."""
    out, bounds = y.clone(), tuple(part_starts.tolist())
    factors = lora.LoraFactors(a, b, ranks, part_starts, bounds)
    lora.add_lora(out, x, factors, lora.LoraGroups(order, starts, slots))
    return out


_LATENT_DECODE = on_one_launch("latent_decode_attention", latent_decode)
_DECODE = on_one_launch("paged_decode_attention", decode)
_PREFILL = on_one_launch("paged_prefill_attention", prefill)
_ADAPTED = on_one_launch("adapted", adapted)


def put_ops_on_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no operation of a model run in C++, so that a tape records every one."""
    monkeypatch.setattr(cpu, "supports", lambda x, length=0: False)
    monkeypatch.setattr(linear, "_supports_packing", lambda weight: False)
    monkeypatch.setattr(
        attention,
        "paged_decode_attention",
        lambda q, cache, tables, lens, scale, *rest: _DECODE(q, cache, tables, lens, scale),
    )
    monkeypatch.setattr(
        attention,
        "paged_prefill_attention",
        lambda q, cache, tables, starts, lens, scale, *rest: _PREFILL(q, cache, tables, starts, lens, scale),
    )
    for module in (attention, latent_layer):
        monkeypatch.setattr(
            module,
            "latent_decode_attention",
            lambda q, cache, tables, lens, scale, dim, *rest: _LATENT_DECODE(
                q, cache, tables, lens, scale, dim
            ),
        )

    def add_lora(y: Tensor, x: Tensor, factors: lora.LoraFactors, groups: lora.LoraGroups) -> None:
        of_layer = factors.a, factors.b, factors.ranks, factors.starts
        y.copy_(_ADAPTED(y, x, *of_layer, groups.order, groups.starts, groups.slots))

    for module in (layers, embedding_adapters):
        monkeypatch.setattr(module, "add_lora", add_lora)


def put_collectives_on_tape(monkeypatch: pytest.MonkeyPatch, communicator: type[Any]) -> None:
    """Let a tape record the sums and the gathers of the class of communicators of an engine's ranks."""
    comms: dict[int, Any] = {}  # rank |-> communicator of the latest engine
    for name in ("all_reduce", "all_gather"):
        _put_on_tape(monkeypatch, communicator, name, comms)


def _put_on_tape(
    monkeypatch: pytest.MonkeyPatch, communicator: type[Any], name: str, comms: dict[int, Any]
) -> None:
    exchange = getattr(communicator, name)

    def run(x: Tensor, rank: int) -> Tensor:
        out: Tensor = exchange(comms[rank], x)
        return out

    on_tape = on_one_launch(name, run)

    def record(comm: Any, x: Tensor) -> Tensor:
        comms[comm.rank] = comm
        return on_tape(x, comm.rank)

    monkeypatch.setattr(communicator, name, record)
