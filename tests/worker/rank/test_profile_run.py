"""The profile run needs as much memory as any step."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from triton_device import DEVICE

from quire.kernels import decode_splits, dispatch, workspace
from quire.kernels.paged_attention import paged_decode_attention
from quire.proto.config import MAX_JUMP_FORWARD_TOKENS
from quire.proto.step import RowSampling
from quire.worker import attention
from quire.worker.comm.communicator import SingleRank
from quire.worker.rank.runner import ModelRunner

GREEDY = RowSampling(temperature=0.0)


def test_profile_run_decodes_all_rows_with_longest_tables(
    make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: set[tuple[int, int]] = set()

    def record(q: Tensor, cache: Tensor, tables: Tensor, *rest: Any) -> Tensor:
        shapes.add((len(q), tables.shape[1]))
        return paged_decode_attention(q, cache, tables, *rest)

    monkeypatch.setattr(attention, "paged_decode_attention", record)
    config = engine_config(make_model("gemma2"), block_size=8, max_num_seqs=6, max_model_len=100)
    runner: Any = ModelRunner(config, SingleRank())
    runner.memory.loaded.model.fused_decode = None  # native, on a CPU only
    runner.memory.run_largest_steps()
    assert shapes == {(6 + MAX_JUMP_FORWARD_TOKENS, 13)}


@pytest.mark.parametrize("device_type", [DEVICE])
@pytest.mark.parametrize("invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_need_no_larger_workspace_than_profile_run(
    make_model: Any,
    make_engine: Any,
    planned: Any,
    monkeypatch: pytest.MonkeyPatch,
    invariant: bool,
    device_type: str,
) -> None:
    """The workspace of the decode kernel grows with the number of rows and, if batch-invariant, with their length."""
    pytest.importorskip("triton")
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(dispatch, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(workspace, "_workspaces", {})
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "batch_invariant": invariant}
    engine = make_engine(make_model("llama", num_hidden_layers=1), device=device_type, **settings)
    (runner,) = engine.runners
    runner.memory.loaded.model.fused_decode = None  # native, on a CPU only
    runner.memory.run_largest_steps()
    (profiled,) = workspace.workspaces(runner.device)
    engine.generate([planned([5 + index] * (1 + 12 * index), 3, GREEDY) for index in range(3)], chunk_len=8)
    assert [each.data_ptr() for each in workspace.workspaces(runner.device)] == [profiled.data_ptr()]


@pytest.mark.parametrize("max_model_len", [16, 5])
def test_block_longer_than_context_is_profiled_and_served(
    make_model: Any, make_engine: Any, max_model_len: int
) -> None:
    folder = make_model("llama")

    def generate(block_size: int) -> list[int]:
        engine = make_engine(folder, num_blocks=16, block_size=block_size, max_model_len=max_model_len)
        (runner,) = engine.runners
        runner.memory.run_largest_steps()
        (generated,) = engine.greedy([[7, 8, 9]], 2)
        return list(generated)

    assert generate(64) == generate(4)
