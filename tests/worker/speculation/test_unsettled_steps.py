"""Steps with drafts on the stand-in GPU: the host launches the next one before it knows which were accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_heads import make_target_with_head
from guided_drafts import GuidedDrafts
from kernel_references import find_reference
from known_outputs import KnownOutputs
from quick_cases import slow_except
from ranked_driver import RankedDriver
from stand_in_gpu import StandInGpu, installed

from quire.proto.config import SpeculativeConfig
from quire.proto.step import StepPlan, StepResult
from quire.worker.rank import loaded_model
from quire.worker.rank.runner import ModelRunner
from quire.worker.rank.step_executor import LaunchedStep
from quire.worker.step.batch import Batch, gather_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")

NUM_DRAFTS, NUM_BLOCKS = 3, 96
PROMPTS = [np.random.default_rng(seed).integers(2, 380, 3 + 7 * seed).tolist() for seed in range(4)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(2, 380))},
]
NGRAMS = SpeculativeConfig("ngram", NUM_DRAFTS)
# Two cache groups, of which one has a window.
TWO_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
SIZES: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
}


@pytest.fixture(scope="module")
def make_head(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_head(kind) -> (target, SpeculativeConfig)`."""
    folder = tmp_path_factory.mktemp("heads")
    return lambda kind: make_target_with_head(make_model, folder, kind, NUM_DRAFTS)


class LaunchedRanks:
    """A worker group of one rank that launches a plan when it is broadcast, and waits for it when it is gathered."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._launched: deque[LaunchedStep] = deque()

    def broadcast(self, plan: StepPlan) -> None:
        self._launched.append(self._runner.launch(StepPlan.decode(plan.encode())))

    def gather(self, timeout_s: float) -> StepResult:
        return replace(self._launched.popleft().result(), stage_times={})


def run(
    engine: Any,
    speculative: SpeculativeConfig | None,
    num_blocks: int = NUM_BLOCKS,
    depth: int = 2,
    **more: Any,
) -> RankedDriver:
    """Run the prompts, of which the last ones come while others decode.

    Args:
        more: settings of the last sequence.
    """
    config = replace(engine.config.with_num_blocks(num_blocks), speculative=speculative)
    driver = RankedDriver(config, engine.step)
    if len(engine.runners) == 1:
        driver.group = LaunchedRanks(engine.runners[0])  # type: ignore[assignment]
    for handle, (prompt, own) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        settings = own | more if prompt is PROMPTS[-1] else own
        driver.add(handle, prompt, max_tokens=12 + 3 * handle, ignore_eos=True, **settings)
        if handle % 2:
            for _ in range(4):
                driver.step(depth)
    driver.run(depth)
    driver.empty_ranks()
    return driver


def count_unsettled_gathers(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the drafts of each step which is gathered while the last verdict is on the device."""
    counts = list[int]()

    def count(rows: Any, plan: StepPlan, block_size: int, num_drafted: Any) -> Batch | None:
        if rows.unsettled.accepted is not None:
            counts.append(0 if num_drafted is None else int(num_drafted.sum()))
        return gather_batch(rows, plan, block_size, num_drafted)

    patch.setattr("quire.worker.rank.runner.gather_batch", count)
    return counts


@contextmanager
def watched_launches(gpu: StandInGpu, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the waits of the host, while it launches a step, for what the last two launches gave the device."""
    ends, waits, wait, launch = [0, 0], list[str](), StandInGpu.host_waits, ModelRunner.launch
    is_launching = False

    def host_waits(self: StandInGpu, cause: str, until: Any) -> None:
        if is_launching and (until is None or until.get(gpu.default_stream, 0) > ends[-2]):
            waits.append(cause)
        wait(self, cause, until)

    def launch_step(self: ModelRunner, plan: StepPlan) -> LaunchedStep:
        nonlocal is_launching
        is_launching = True
        step = launch(self, plan)
        is_launching = False
        ends.append(gpu.default_stream.time)
        return step

    patch.setattr(StandInGpu, "host_waits", host_waits)
    patch.setattr(ModelRunner, "launch", launch_step)
    yield waits


@pytest.mark.parametrize("kind", slow_except(["mtp"], ["eagle3", "mtp", "deepseek_v3"]))
def test_host_never_waits_for_a_verdict(
    make_head: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nor for anything else that is not over, but after a step with drafts and a prompt; the tokens are the same."""
    target, speculative = make_head(kind)
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        engine = make_engine(target, 1, NUM_BLOCKS, device="cuda", speculative=speculative, **SIZES)
        plain = run(engine, None)
        guide = GuidedDrafts([PROMPTS[handle] + output for handle, output in plain.outputs.items()])
        guide.install(monkeypatch)
        with watched_launches(gpu, monkeypatch) as waits:
            drafted = run(engine, speculative)
        beside_prompts = [plan for plan in drafted.plans if plan.draft_rows.size and plan.chunk_rows.size]
        assert 0 < len(beside_prompts) < 4
        assert len(waits) <= len(beside_prompts)
        assert drafted.outputs == plain.outputs
        assert [entry[1:3] for entry in drafted.logprobs[0]] == [entry[1:3] for entry in plain.logprobs[0]]
        found, expected = ([[entry[0], *entry[3]] for entry in each.logprobs[0]] for each in (drafted, plain))
        np.testing.assert_allclose(found, expected, atol=1e-4)
        stats = drafted.scheduler.stats
        assert sum(stats.num_accepted) > 0.4 * stats.num_draft_tokens > 0
        assert guide.num_unsettled > guide.num_certain > 0


@pytest.mark.parametrize(
    ("kind", "how"),
    slow_except(
        [("eagle3", {"penalty": True})],
        [
            ("eagle3", {"penalty": True}),
            ("eagle3", {"num_blocks": 15}),
            ("eagle3", {"depth": 1}),
            ("qwen3_next", {"num_state_slots": 24}),
            ("mtp", {"cuda_graphs": False}),
            ("mtp", {"pp": 2}),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_tokens_are_those_without_drafts(
    make_head: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, kind: str, how: dict[str, Any]
) -> None:
    """With a row whose processors need each token, preemptions, one step in flight, states, and two stages."""
    settings, run_settings = SIZES | how, dict[str, Any]()
    if settings.pop("penalty", False):
        run_settings["repetition_penalty"] = 1.3
    run_settings |= {key: settings.pop(key) for key in ("num_blocks", "depth") if key in settings}
    target, speculative = make_head(kind)
    with installed(monkeypatch, stand_in=find_reference):
        engine = make_engine(target, 1, NUM_BLOCKS, device="cuda", speculative=speculative, **settings)
        plain = run(engine, None, **run_settings)
        guide = GuidedDrafts([PROMPTS[handle] + output for handle, output in plain.outputs.items()])
        guide.install(monkeypatch)
        gathers = count_unsettled_gathers(monkeypatch)
        drafted = run(engine, speculative, **run_settings)
    assert drafted.outputs == plain.outputs
    stats = drafted.scheduler.stats
    assert stats.num_draft_tokens > 0
    if settings.get("cuda_graphs", True):
        assert sum(stats.num_accepted) > 0.4 * stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == ("num_blocks" in run_settings)
    assert max(gathers) > 0 or settings.keys() & {"pp", "cuda_graphs"}


@pytest.mark.parametrize("kind", slow_except(["gemma2"], ["llama", "gemma2"]))
def test_steps_without_drafts_follow_unsettled_ones(
    make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also in two cache groups, of which one has a window. Drafts of n-grams wait for the tokens."""
    folder = make_model(kind, **(TWO_LAYERS if kind == "gemma2" else {"num_hidden_layers": 1}))
    monkeypatch.setattr(loaded_model, "NgramProposer", KnownOutputs)
    monkeypatch.setattr(KnownOutputs, "known", [], raising=False)
    with installed(monkeypatch, stand_in=find_reference):
        engine = make_engine(folder, 1, NUM_BLOCKS, device="cuda", speculative=NGRAMS, **SIZES)
        plain = run(engine, None)
        KnownOutputs.known = [PROMPTS[handle] + output for handle, output in plain.outputs.items()]
        gathers = count_unsettled_gathers(monkeypatch)
        drafted = run(engine, NGRAMS)
    assert drafted.outputs == plain.outputs
    assert sum(drafted.scheduler.stats.num_accepted) > 0
    assert 0 in gathers
