"""Attention that gathers the keys of whole sequences is recorded for a few bounds of their lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_device
from kernel_references import find_reference
from quick_cases import slow_except
from stand_in_gpu import current_gpu, installed, is_installed
from state_kinds import STATE_KINDS

from quire.kernels import decode_splits
from quire.proto.step import RowSampling
from quire.worker.graphs import graph_shapes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
assert triton_device

# Model type |-> its configuration, with layers that choose among few tokens.
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v4": STATE_KINDS["deepseek_v4"]
    | {"num_hidden_layers": 3, "hc_mult": 2, "hc_sinkhorn_iters": 2},
    "deepseek_v4-two-rates": STATE_KINDS["deepseek_v4-two-rates"],
    "hy_v4": {},
    "minimax_m3_vl_text": {},
    "qwen4_exp_text": STATE_KINDS["qwen4_exp_text"] | {"indexer_budget": 8},
    "zaya": STATE_KINDS["zaya"],
}
# Tokens of a prompt, and of its output: one sequence passes the bound while it decodes, and one before.
LENS = ((5, 13), (3, 4), (21, 5))


@pytest.mark.parametrize("kind", slow_except([kind for kind in KINDS if "-" not in kind], KINDS))
def test_recorded_steps_of_any_lengths_give_the_tokens_of_the_cpu(
    kind: str, make_model: Any, make_engine: Any, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_shapes, "GATHERED_LENS", (16,))
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    folder = make_model(kind.partition("-")[0], seed=3, **KINDS[kind])
    found: list[Any] = []

    def generate(device: str) -> list[list[int]]:
        sequences = [
            planned(
                [(7 * place + 31 * index) % 380 + 1 for place in range(num_prompt)],
                num_tokens,
                RowSampling(temperature=0.0),
                arrival=4 * index,
            )
            for index, (num_prompt, num_tokens) in enumerate(LENS)
        ]
        engine = make_engine(folder, max_num_batched_tokens=4, max_num_seqs=2, num_blocks=64, device=device)
        if is_installed():
            current_gpu().num_syncs.clear()
            graphs = engine.runners[0].memory.executor.graphs
            find = graphs._find_for

            def find_shape(batch: Any) -> Any:
                found.append(find(batch))
                return found[-1]

            monkeypatch.setattr(graphs, "_find_for", find_shape)
        engine.generate(sequences, chunk_len=4)
        engine.close()
        return [sequence.generated for sequence in sequences]

    expected = generate("cpu")
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        assert generate("cuda") == expected
        assert set(gpu.num_syncs) == {"event.synchronize"}
        num_replayed = sum(shape is not None for shape in found)
        assert gpu.num_replays >= num_replayed > 4
    if kind == "zaya":  # its attention reads blocks of any length
        assert any(shape.num_chunks for shape in found if shape is not None)
        return
    assert {shape and shape.max_len for shape in found} == {None, 16}
    assert not any(shape.num_chunks for shape in found if shape is not None)


def test_bounded_shapes_gather_a_bounded_number_of_keys() -> None:
    shapes = graph_shapes.bounded_shapes(graph_shapes.decode_shapes(256, 256), 100_000)
    assert {shape.max_len for shape in shapes if shape.num_rows == 256} == {1024}
    assert {shape.max_len for shape in shapes if shape.num_rows == 32} == {1024, 4096, 16384}
    assert max(shape.num_rows * shape.max_len for shape in shapes) <= graph_shapes.MAX_GATHERED_TOKENS
    assert graph_shapes.find_shape(shapes, 20, 0, 0, 1000) == graph_shapes.GraphShape(24, max_len=1024)
    assert graph_shapes.find_shape(shapes, 20, 0, 0, 5000) == graph_shapes.GraphShape(24, max_len=16384)
    assert graph_shapes.find_shape(shapes, 100, 0, 0, 5000) is None
    assert {shape.max_len for shape in graph_shapes.bounded_shapes(shapes[:1], 700)} == {700}
