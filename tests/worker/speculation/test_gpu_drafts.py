"""Drafted tokens on a stand-in GPU: the decode kernel reads a sequence's keys once for all of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton_device
from kernel_references import find_reference
from known_outputs import KnownOutputs
from ranked_driver import RankedDriver
from stand_in_gpu import installed
from torch import Tensor

from quire.kernels import decode_splits, workspace
from quire.kernels.decode_splits import DecodeSplits
from quire.proto.config import SpeculativeConfig
from quire.worker.rank import loaded_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
assert triton_device

NUM_BLOCKS, NUM_DRAFTS = 64, 3
SPECULATIVE = SpeculativeConfig("ngram", NUM_DRAFTS)
PROMPTS = [np.random.default_rng(seed).integers(2, 380, 3 + 9 * seed).tolist() for seed in range(3)]
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
}
# Two cache groups, of which one has a window.
TWO_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Decodes:
    """Runs Triton's decode kernel, and references of all others.

    Attributes:
        is_warm: the engine is prepared; until then the decode kernel's reference saves seconds.
        run_lens: rows of each run that the kernel has had.
    """

    def __init__(self) -> None:
        self.is_warm = False
        self.run_lens = set[int]()

    def find(self, module: str, name: str) -> Callable[..., Any]:
        if name != "paged_decode_attention":
            return find_reference(module, name)
        from quire.kernels.gpu.paged_decode import paged_decode_attention

        reference = find_reference(module, name)

        def decode(*args: Any) -> Tensor:
            if not self.is_warm:
                out: Tensor = reference(*args)
                return out
            splits: DecodeSplits = args[5]
            if splits.runs is not None:
                num_seqs, ends = len(splits.runs.ends), splits.runs.ends.tolist()
                self.run_lens |= {ends[row] - row for row in splits.item_seqs.tolist() if row < num_seqs}
            return paged_decode_attention(*args)

        return decode


def run(engine: Any, speculative: SpeculativeConfig | None) -> RankedDriver:
    config = replace(engine.config.with_num_blocks(NUM_BLOCKS), speculative=speculative)
    driver = RankedDriver(config, engine.step)
    for handle, prompt in enumerate(PROMPTS):
        driver.add(handle, prompt, max_tokens=9 + handle, temperature=0.0, ignore_eos=True)
    driver.run(1)
    driver.empty_ranks()
    engine.close()
    return driver


@pytest.mark.parametrize(
    ("kind", "settings", "shares"),
    [
        ("llama", {}, True),
        pytest.param("llama", {"cuda_graphs": False}, True, marks=pytest.mark.slow),
        pytest.param("gemma2", {"model": TWO_LAYERS}, True, marks=pytest.mark.slow),
        ("llama", {"batch_invariant": True}, False),
        ("deepseek_v3", {}, False),
    ],
    ids=["graphs", "eager", "windows", "batch-invariant", "latents"],
)
def test_drafted_tokens_share_reads_and_give_the_tokens_of_a_cpu(
    make_model: Any,
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    settings: dict[str, Any],
    shares: bool,
) -> None:
    settings = SIZES | settings
    folder = make_model(kind, **{"num_hidden_layers": 1, **settings.pop("model", {})})
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(decode_splits, "MIN_ITEM_LEN", 32)
    plain = run(make_engine(folder, 1, NUM_BLOCKS, **settings), None)
    KnownOutputs.known = [PROMPTS[handle] + output for handle, output in plain.outputs.items()]
    monkeypatch.setattr(loaded_model, "NgramProposer", KnownOutputs)
    decodes = Decodes()
    with installed(monkeypatch, stand_in=decodes.find) as gpu:
        engine = make_engine(folder, 1, NUM_BLOCKS, device="cuda", speculative=SPECULATIVE, **settings)
        decodes.is_warm = True
        gpu.num_replays = 0
        drafted = run(engine, SPECULATIVE)
        assert (gpu.num_replays > 0) == settings.get("cuda_graphs", True)
    assert drafted.outputs == plain.outputs
    assert drafted.scheduler.stats.num_drafts > 0
    assert max(decodes.run_lens, default=0) == (1 + NUM_DRAFTS if shares else 0)


def test_steps_with_drafts_need_no_larger_workspace_than_the_profile_run(
    make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of a run has partial results of its own."""
    folder = make_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(decode_splits, "NUM_EXTRA_ITEMS", 4)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(loaded_model, "NgramProposer", KnownOutputs)
    plain = run(make_engine(folder, 1, NUM_BLOCKS, **SIZES), None)
    KnownOutputs.known = [PROMPTS[handle] + output for handle, output in plain.outputs.items()]
    decodes = Decodes()
    with installed(monkeypatch, stand_in=decodes.find):
        settings = SIZES | {"cuda_graphs": False, "speculative": SPECULATIVE}
        engine = make_engine(folder, 1, NUM_BLOCKS, device="cuda", **settings)
        decodes.is_warm = True
        engine.runners[0].memory.run_largest_steps()
        ((device, (profiled,)),) = workspace._workspaces.items()
        decodes.run_lens.clear()
        run(engine, SPECULATIVE)
        assert max(decodes.run_lens) == 1 + NUM_DRAFTS
        assert [each.data_ptr() for each in workspace.workspaces(device)] == [profiled.data_ptr()]
