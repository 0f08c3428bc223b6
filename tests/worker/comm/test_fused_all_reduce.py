"""Fused all-reduce and norm: same tokens as separate ops, and errors for unsupported devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs import capture
from torch.multiprocessing.spawn import spawn

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.kernels import all_reduce_norm
from quire.kernels.all_reduce_norm import NUM_SIGNALS, Peers, all_reduce_add_rms_norm
from quire.proto.errors import ConfigError
from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.symmetric_memory import open_symmetric_memory
from quire.worker.comm.torch_distributed import TorchDistributed, create_store
from quire.worker.models import load_context

HOST = "127.0.0.1"
MAX_TOKENS = 3
PROMPT = [7, 21, 300, 45, 11]


@pytest.mark.parametrize(
    ("kind", "num_fused", "num_last"),
    [("llama", 6, 2), ("gemma2", 0, 0), ("qwen3_moe", 3, 1)],
    ids=["llama", "gemma2", "moe"],
)
def test_fused_all_reduce_gives_tokens_of_separate_ops(
    kind: str,
    num_fused: int,
    num_last: int,
    make_model: Any,
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank, whose partial sum is the sum. Of three layers, five norms and the last norm follow a sum.

    The prompt is too long for a fused sum, except in the last layer, which computes its last token only. Sums with a
    norm before the residual addition and sums of MoE layers are not fused.
    """
    folder = make_model(kind, seed=3)
    calls: list[int] = []
    fused: Callable[..., torch.Tensor] = all_reduce_add_rms_norm

    def count(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x))
        return fused(x, *rest)

    class OneRank:
        def open(self, comm: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Peers:
            signals = torch.zeros(NUM_SIGNALS, dtype=torch.int32)
            return Peers(0, [torch.zeros(2, MAX_TOKENS, hidden_size, dtype=dtype)], [signals])

    def generate() -> list[int]:
        (generated,) = make_engine(folder, 1, num_blocks=16).greedy([list(PROMPT)], 6)
        tokens: list[int] = generated
        return tokens

    expected = generate()
    monkeypatch.setattr(all_reduce_norm, "all_reduce_add_rms_norm", count)
    make_context: Callable[..., None] = load_context.LoadContext.__init__

    def with_fused(self: Any, *arguments: Any, **options: Any) -> None:
        make_context(self, *arguments, **(options | {"sums": OneRank()}))

    monkeypatch.setattr(load_context.LoadContext, "__init__", with_fused)
    assert generate() == expected
    assert calls == [1] * (num_last + 5 * num_fused)


def test_fused_all_reduce_without_gpus_raises_config_error(demo_model_dir: Any) -> None:
    options = EngineOptions("demo", device="cpu", tensor_parallel_size=2, fused_all_reduce=True)
    with pytest.raises(ConfigError, match="fused_all_reduce is for several ranks on GPUs"):
        resolve(options, Machine(num_cores=2, num_gpus=0))
    with pytest.raises(ConfigError, match="fused_all_reduce needs several ranks"):
        open_symmetric_memory(SingleRank(), 64, torch.float32, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fused_all_reduce_is_bit_identical_on_all_gpus() -> None:
    """Eager calls, and replays of one graph with back-to-back calls."""
    store, port = create_store(HOST)
    spawn(be_rank, (2, port), nprocs=2)
    del store


def be_rank(rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    comm = TorchDistributed.join(rank, size, HOST, port, device, 120)
    peers = open_symmetric_memory(comm, 96, torch.bfloat16, device)
    torch.manual_seed(0)
    parts = torch.randn(size, 40, 96, dtype=torch.bfloat16)
    residual, weight = torch.randn(40, 96).bfloat16(), torch.randn(96).bfloat16()
    x, own_residual, own_weight = parts[rank].to(device), residual.to(device), weight.to(device)

    def step() -> torch.Tensor:
        out = own_residual
        for _ in range(3):
            out = all_reduce_add_rms_norm(x, own_residual, own_weight, 1e-5, peers)
        return out

    graph, out = capture(step)
    for _ in range(20):
        own_residual.copy_(residual)
        graph.replay()
        everyone = comm.all_gather(out.float())
        assert torch.equal(everyone[0], everyone[1])
    total = residual.double() + 3 * parts.double().sum(dim=0)
    expected = total * (total.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(out.double().cpu(), expected, atol=5e-2, rtol=5e-2)
    comm.close()
