"""Heads that read the target model's hidden states: their drafts equal a reference, and outputs stay the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from adapters import ATTENTION, VOCABULARY, merge, write_adapter
from draft_contexts import assert_same_drafts
from draft_heads import (
    Eagle3,
    HeadReference,
    LayerMtp,
    Mtp,
    add_mtp,
    append_mtp,
    as_speculators,
    write_eagle3,
)
from quick_cases import slow_except
from ranked_driver import RankedDriver
from reference import Reference
from state_kinds import STATE_KINDS

from benchmarks.draft_lengths import fixed_lengths
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.kernels.native.library import is_available
from quire.proto.block_tables import IntArray, RowArray
from quire.proto.config import LoraConfig, SpeculativeConfig
from quire.proto.lora import LoraReference
from quire.worker.models.vocab_parallel import VocabParallelHead
from quire.worker.speculation import head_proposer
from quire.worker.speculation.head_proposer import HeadProposer

NUM_SPECULATIVE_TOKENS = 3
NUM_BLOCKS = 160
PROMPTS = [np.random.default_rng(seed).integers(2, 380, 2 + 9 * seed).tolist() for seed in range(5)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "n": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0},
]
# A draft that the reference does not choose has a logit this close to that of the one that it does.
NEAR_TIE = 2e-3
# With weights and inputs of products in bfloat16.
NARROW_NEAR_TIE = 0.1


# Heads whose layer is one of the target's kind |-> its model type and settings.
APPENDED: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp-experts": ("glm4_moe", {"attention_bias": True}),
    "mtp-latents": ("deepseek_v3", {}),
    "mtp-sparse": ("deepseek_v32", {"index_topk": 7}),
    "mtp-sparse-shared": ("glm_moe_dsa", {"index_topk": 7}),
    "mtp-ernie": ("ernie4_5_moe", {"use_bias": False}),
    "mtp-qwen3-next": ("qwen3_next", STATE_KINDS["qwen3_next"] | {"mlp_only_layers": []}),
    "mtp-qwen3-5": ("qwen3_5_text", STATE_KINDS["qwen3_5_text"]),
    "mtp-qwen3-5-moe": ("qwen3_5_moe_text", STATE_KINDS["qwen3_5_moe_text"]),
    "mtp-bailing": ("bailing_hybrid", STATE_KINDS["bailing_hybrid"]),
}


@pytest.fixture(scope="module")
def make_head(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`make_head(kind) -> (target, SpeculativeConfig, reference class)`."""
    folder = tmp_path_factory.mktemp("heads")

    def make(kind: str) -> tuple[Path, SpeculativeConfig, type[HeadReference]]:
        model_type, overrides = APPENDED.get(kind, ("qwen2" if kind == "mtp-mimo" else "llama", {}))
        target = make_model(model_type, **overrides)
        vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
        num_layers = json.loads((target / "config.json").read_text())["num_hidden_layers"]
        path, method = folder / kind, "mtp"
        reference: type[HeadReference] = Mtp
        if kind.startswith("eagle3"):
            method, reference = "eagle3", Eagle3
            settings = {} if kind == "eagle3" else {"draft_vocab_size": 90, "norm_before_residual": True}
            if not path.exists():
                write_eagle3(path, vocab_size, num_layers=num_layers, **settings)
                if kind == "eagle3-speculators":
                    as_speculators(path.rename(folder / "others"), path)
        else:
            if kind in APPENDED:
                reference = LayerMtp
            if not path.exists():
                if kind in APPENDED:
                    append_mtp(target, path)
                else:
                    add_mtp(target, path, mimo=kind == "mtp-mimo")
            target = path
        text = json.dumps(
            {
                "method": method,
                "model": str(path) if method == "eagle3" else None,
                "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            }
        )
        options = EngineOptions(
            str(target), device="cpu", speculative_config=text, dtype="float32", max_model_len=128
        )
        speculative = resolve(options, Machine(1, 0)).speculative
        assert speculative is not None
        return target, speculative, reference

    return make


class Recorder(HeadProposer):
    """Records what the head drafts for greedy rows, and replaces three of four drafted tokens by the right ones.

    Attributes:
        known: prompt and output of all sequences.
        drafts: known tokens and drafted ones, of rows without a temperature.
        of_contexts: known tokens and seed |-> drafted tokens, of all rows.
    """

    known: ClassVar[list[list[int]]] = []
    drafts: ClassVar[list[tuple[list[int], list[int]]]] = []
    of_contexts: ClassVar[dict[tuple[tuple[int, ...], int], list[int]]] = {}

    def propose(self, rows: RowArray, max_lens: IntArray) -> IntArray:
        lens = super().propose(rows, max_lens)
        table, drafted = self._rows, lens > 0
        starts = table.lens[rows]
        texts = table.read_tokens(rows, np.zeros_like(starts), starts + lens)
        rng = np.random.default_rng(int(starts.sum()))  # the same on all ranks
        for row, length, start, text, is_drafted in zip(rows, lens, starts, texts, drafted, strict=True):
            if not is_drafted:
                continue
            tokens = text.tolist()
            if table.sampling.greedy[row]:
                self.drafts.append((tokens[:start], tokens[start:]))
            self.of_contexts[tuple(tokens[:start]), int(table.sampling.seed[row])] = tokens[start:]
            whole = next((own for own in self.known if own[:start] == tokens[:start]), [])
            right = np.array(whole[start : start + length], np.int32)
            if right.size and rng.random() < 0.75:
                table.write_drafts(np.array([row]), np.array([right.size]), right)
        return lens


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder.known, Recorder.drafts, Recorder.of_contexts = [], [], {}
    # The reference has the hidden states of all tokens.
    monkeypatch.setattr(head_proposer, "MAX_IDLE_STEPS", 1_000_000)


@pytest.fixture(scope="module")
def make_recording_engine(make_engine: Any, make_head: Any) -> Any:
    def make(
        kind: str, tp: int, *, pp: int = 1, narrows: bool = False, enable_dp_attention: bool = False
    ) -> tuple[Any, type[HeadReference], Path]:
        target, speculative, reference = make_head(kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.worker.rank.loaded_model.HeadProposer", Recorder)
            patch.setattr(head_proposer, "NARROWS", narrows)
            engine = make_engine(
                target,
                tp,
                NUM_BLOCKS,
                max_model_len=128,
                block_size=4,
                max_num_seqs=8,
                speculative=speculative,
                enable_dp_attention=enable_dp_attention,
                pp=pp,
                num_state_slots=24 if APPENDED.get(kind, ("",))[0] in STATE_KINDS else None,
            )
        head = target if speculative.method == "mtp" else Path(speculative.draft.path)
        return engine, reference, head

    return make


def run(engine: Any, num_blocks: int, config: SpeculativeConfig | None, depth: int = 2) -> RankedDriver:
    driver = RankedDriver(replace(engine.config.with_num_blocks(num_blocks), speculative=config), engine.step)
    for index, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        driver.add(10 * index, prompt, max_tokens=24, ignore_eos=True, **settings)
    driver.run(depth)
    driver.empty_ranks()
    return driver


def learn(driver: RankedDriver) -> None:
    Recorder.known = [PROMPTS[handle // 10] + output for handle, output in driver.outputs.items()]


def transformers_model(engine: Any) -> Any:
    import transformers

    kind = (
        "Qwen2ForCausalLM"
        if engine.config.model.architecture == "MiMoForCausalLM"
        else "AutoModelForCausalLM"
    )
    folder = engine.config.model.path
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


def check_drafts(reference: HeadReference, near_tie: float = NEAR_TIE) -> int:
    """Assert that all recorded drafts are those of the reference, up to near-ties; return their number."""
    for tokens, drafted in Recorder.drafts:
        for token, (logits, best) in zip(drafted, reference.draft(tokens, len(drafted)), strict=True):
            if token != best:
                assert logits[best] - logits[token] < near_tie, (tokens, drafted)
                break  # the drafts differ from here on
    return len(Recorder.drafts)


# Each kind on one number of ranks, and the numbers of ranks in turns.
QUICK = [
    ("eagle3", 4), ("eagle3-own-vocabulary", 2), ("eagle3-speculators", 1), ("mtp", 2), ("mtp-mimo", 1),
    ("mtp-experts", 2), ("mtp-latents", 2), ("mtp-latents dp", 4), ("mtp-sparse", 1), ("mtp-sparse dp", 2),
    ("mtp-sparse-shared", 2), ("mtp-ernie", 1), ("mtp-qwen3-next", 2), ("mtp-qwen3-5", 1), ("mtp-qwen3-5-moe", 2),
    ("mtp-bailing", 1), ("mtp-bailing dp", 2),
]  # fmt: skip
SLOW = [
    ("eagle3", 1), ("mtp-mimo", 4), ("mtp-latents", 1), ("mtp-latents dp", 2), ("mtp-sparse", 4), ("mtp-ernie", 2),
    ("mtp-qwen3-next", 1), ("mtp-qwen3-5", 2), ("mtp-qwen3-5-moe", 1), ("mtp-bailing", 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tp"), slow_except(QUICK, QUICK + SLOW))
def test_drafts_equal_reference_and_outputs_those_without(
    make_recording_engine: Any, kind: str, tp: int
) -> None:
    kind, is_dp, _ = kind.partition(" dp")
    engine, reference_type, head = make_recording_engine(kind, tp, enable_dp_attention=bool(is_dp))
    plain = run(engine, NUM_BLOCKS, None)
    learn(plain)
    drafted = run(engine, NUM_BLOCKS, engine.config.speculative)
    assert drafted.outputs == plain.outputs
    stats = drafted.scheduler.stats
    assert sum(stats.num_accepted) > 0.3 * stats.num_draft_tokens > 0
    assert len(drafted.plans) < 0.8 * len(plain.plans)
    assert check_drafts(reference_type(head, transformers_model(engine))) > 10


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        ("eagle3", 2, 1),
        ("eagle3-own-vocabulary", 3, 1),
        pytest.param("eagle3-speculators", 2, 2, marks=pytest.mark.slow),
        ("mtp", 2, 2),
        pytest.param("mtp-qwen3-next", 2, 1, marks=pytest.mark.slow),
        pytest.param("mtp-sparse", 2, 1, marks=pytest.mark.slow),
        pytest.param("mtp-latents dp", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_stages_draft_like_reference_and_keep_the_tokens(
    make_recording_engine: Any, kind: str, pp: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after preemptions, where hidden states are dropped, and in a new group."""
    kind, is_dp, _ = kind.partition(" dp")
    engine, reference_type, head = make_recording_engine(kind, tp, pp=pp, enable_dp_attention=bool(is_dp))
    plain = run(engine, NUM_BLOCKS, None, pp + 1)
    learn(plain)
    config = engine.config.speculative
    drafted = run(engine, NUM_BLOCKS, config, pp + 1)
    assert drafted.outputs == plain.outputs
    stats = drafted.scheduler.stats
    assert sum(stats.num_accepted) > 0.3 * stats.num_draft_tokens > 0
    assert check_drafts(reference_type(head, transformers_model(engine))) > 10
    if is_dp:  # the blocks of the ranks are numbered for all
        return
    monkeypatch.setattr(head_proposer, "MAX_PENDING_BYTES", 5000)  # some twenty tokens
    preempted = run(engine, 30, config, pp + 1)
    assert preempted.scheduler.stats.num_preemptions > 0
    assert sum(preempted.scheduler.stats.num_accepted) > 0
    assert preempted.outputs == plain.outputs
    engine.forget_transfers()
    engine.on_all(lambda runner: runner.reset(has_new_ranks=True), engine.runners)
    assert run(engine, NUM_BLOCKS, config, pp + 1).outputs == plain.outputs


@pytest.mark.parametrize(
    ("kind", "shares_output"), [("eagle3", True), ("eagle3-own-vocabulary", False), ("mtp", True)]
)
def test_first_stage_alone_has_the_head(make_recording_engine: Any, kind: str, shares_output: bool) -> None:
    """With the output layer of the model, if the head has none of its own."""
    engine, _, _ = make_recording_engine(kind, 1, pp=3)
    stages = [runner.memory for runner in engine.runners]
    assert [own.loaded.head is not None for own in stages] == [True, False, False]
    assert [len(own.kv.cache.draft_layers) for own in stages] == [1, 0, 0]
    outputs = [isinstance(own.loaded.model.head, VocabParallelHead) for own in stages]
    assert outputs == [shares_output, False, True]
    reads = [own.loaded.tap.head is not None for own in stages]
    assert reads == [True, kind != "mtp", True]


def test_stages_pause_and_drop_hidden_states_together(
    make_recording_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states are dropped also of the step in flight, whose sequence takes turns with the other one."""
    engine, _, _ = make_recording_engine("eagle3", 1, pp=2)
    head, keeps = engine.runners[0].memory.loaded.head, True
    driver = drive_without_drafts(engine, lambda: keeps)
    driver.add(1, PROMPTS[1], max_tokens=24, ignore_eos=True, temperature=0.0)
    for _ in range(6):
        driver.step(3)
    assert head._pending.num_tokens > 0
    keeps = False
    for _ in range(4):
        driver.step(3)
    assert head._pending.num_tokens == 0
    assert not any(runner.memory.loaded.tap.is_open for runner in engine.runners)
    keeps = True
    for _ in range(6):
        driver.step(3)
    assert 1 < head._pending.num_tokens <= 6
    monkeypatch.setattr(head_proposer, "MAX_IDLE_STEPS", 1)
    monkeypatch.setattr(head_proposer, "MAX_IDLE_TOKENS", 1)
    driver.step(3)
    assert not head.wants_features
    assert head._pending.num_tokens == 0
    driver.run(3)
    driver.empty_ranks()


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", ["eagle3", "eagle3-own-vocabulary", "mtp-mimo"])
def test_drafts_of_one_call_equal_those_of_ops_one_by_one(
    make_recording_engine: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = make_recording_engine(kind, 1)
    head = engine.runners[0].memory.loaded.head
    assert head._fused is not None
    fused = run(engine, NUM_BLOCKS, engine.config.speculative)
    of_one_call = dict(Recorder.of_contexts)
    Recorder.of_contexts.clear()
    monkeypatch.setattr(head, "_fused", None)
    assert run(engine, NUM_BLOCKS, engine.config.speculative).outputs == fused.outputs
    # A fork copies a block whose pairs its parent may compute before or after that.
    forked = tuple(PROMPTS[2])
    for drafts in (of_one_call, Recorder.of_contexts):
        for context in [key for key in drafts if key[0][: len(forked)] == forked]:
            del drafts[context]
    assert_same_drafts(of_one_call, Recorder.of_contexts)


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", ["eagle3", "mtp-mimo"])
def test_drafts_in_bfloat16_are_near_those_of_the_reference(make_recording_engine: Any, kind: str) -> None:
    engine, reference_type, head = make_recording_engine(kind, 1, narrows=True)
    plain = run(engine, NUM_BLOCKS, None)
    learn(plain)
    assert run(engine, NUM_BLOCKS, engine.config.speculative).outputs == plain.outputs
    assert check_drafts(reference_type(head, transformers_model(engine)), NARROW_NEAR_TIE) > 10


@pytest.mark.parametrize(("kind", "tp"), [("eagle3", 1), ("mtp-qwen3-next", 2), ("mtp-bailing", 1)])
def test_preempted_moved_and_rebuilt_sequences_continue_with_same_tokens(
    make_recording_engine: Any, kind: str, tp: int
) -> None:
    engine, _, _ = make_recording_engine(kind, tp)
    plain = run(engine, NUM_BLOCKS, None)
    learn(plain)
    config = engine.config.speculative
    preempted = run(engine, 30, config)
    assert preempted.scheduler.stats.num_preemptions > 0
    assert sum(preempted.scheduler.stats.num_accepted) > 0
    assert preempted.outputs == plain.outputs
    engine.on_all(lambda runner: runner.reset(has_new_ranks=True), engine.runners)
    assert run(engine, NUM_BLOCKS, config).outputs == plain.outputs

    driver = RankedDriver(replace(engine.config.with_num_blocks(NUM_BLOCKS), speculative=config), engine.step)
    settings = {"max_tokens": 24, "ignore_eos": True, **SETTINGS[0]}
    driver.add(0, PROMPTS[0], **settings)
    while len(driver.outputs[0]) < 10:
        driver.step(2)
    driver.scheduler.drain(0.0, 0.0)
    driver.run(2)
    driver.empty_ranks()
    successor = RankedDriver(driver.config, engine.step)
    successor.add(0, PROMPTS[0], generated=driver.outputs[0], **settings)
    successor.run(2)
    successor.empty_ranks()
    assert driver.outputs[0] + successor.outputs[0] == plain.outputs[0]


def test_hidden_states_beyond_the_limit_are_computed_at_once(
    make_recording_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference_type, head = make_recording_engine("eagle3", 1)
    learn(run(engine, NUM_BLOCKS, None))
    Recorder.drafts.clear()
    monkeypatch.setattr(head_proposer, "MAX_PENDING_BYTES", 5000)  # some seven tokens
    run(engine, NUM_BLOCKS, engine.config.speculative)
    assert check_drafts(reference_type(head, transformers_model(engine))) > 10


def test_sequences_without_hidden_states_do_not_draft_and_later_ones_do(
    make_recording_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = make_recording_engine("eagle3", 1)
    plain = run(engine, NUM_BLOCKS, None)
    learn(plain)
    (runner,) = engine.runners
    head = runner.memory.loaded.head
    monkeypatch.setattr(type(head), "wants_features", False)
    idle = run(engine, NUM_BLOCKS, engine.config.speculative)
    assert idle.outputs == plain.outputs
    assert idle.scheduler.stats.num_draft_tokens == 0
    monkeypatch.undo()
    assert head.wants_features
    Recorder.known = [PROMPTS[handle // 10] + output for handle, output in plain.outputs.items()]
    assert sum(run(engine, NUM_BLOCKS, engine.config.speculative).scheduler.stats.num_accepted) > 0


def drive_without_drafts(engine: Any, keeps_states: Callable[[], bool]) -> RankedDriver:
    """Return a driver with a sequence that never drafts, whose plans keep hidden states as told."""
    driver = RankedDriver(replace(engine.config.with_num_blocks(NUM_BLOCKS), speculative=None), engine.step)
    driver.add(0, PROMPTS[0], max_tokens=24, ignore_eos=True, temperature=0.0)
    broadcast = driver.group.broadcast
    driver.group.broadcast = lambda plan: broadcast(  # type: ignore[method-assign]
        replace(plan, keeps_states=keeps_states())
    )
    return driver


def test_plans_without_hidden_states_keep_none(make_recording_engine: Any) -> None:
    engine, _, _ = make_recording_engine("eagle3", 1)
    (runner,) = engine.runners
    keeps = True
    driver, pending = drive_without_drafts(engine, lambda: keeps), runner.memory.loaded.head._pending
    driver.step(1)
    driver.step(1)
    assert pending.num_tokens > 0
    keeps = False
    driver.step(1)
    assert pending.num_tokens == 0
    assert not runner.memory.loaded.tap.is_open
    keeps = True
    driver.step(1)
    assert pending.num_tokens == 1
    driver.run(1)
    driver.empty_ranks()


def test_steps_recorded_anew_keep_no_more_hidden_states_than_plans_want(make_recording_engine: Any) -> None:
    engine, _, _ = make_recording_engine("eagle3", 1)
    (runner,) = engine.runners
    for _ in range(2):
        driver = drive_without_drafts(engine, lambda: False)
        driver.step(1)
        assert not runner.memory.loaded.tap.is_open
        driver.run(1)
        driver.empty_ranks()
        runner.reset(has_new_ranks=False)


def test_pause_keeps_hidden_states_of_few_tokens(
    make_recording_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = make_recording_engine("eagle3", 1)
    monkeypatch.setattr(head_proposer, "MAX_IDLE_STEPS", 2)
    (runner,) = engine.runners
    head = runner.memory.loaded.head
    for most, is_kept in ((1000, True), (3, False)):
        monkeypatch.setattr(head_proposer, "MAX_IDLE_TOKENS", most)
        driver = RankedDriver(
            replace(engine.config.with_num_blocks(NUM_BLOCKS), speculative=None), engine.step
        )
        driver.add(0, PROMPTS[0], max_tokens=12, ignore_eos=True, temperature=0.0)
        for _ in range(10):
            driver.step(1)
        assert head.wants_features == is_kept
        driver.run(1)
        driver.empty_ranks()


def test_prefix_hit_drafts_like_reference(make_recording_engine: Any) -> None:
    engine, reference_type, head = make_recording_engine("eagle3", 1)
    prompt = PROMPTS[-1]
    config = replace(engine.config.with_num_blocks(NUM_BLOCKS), speculative=engine.config.speculative)
    driver = RankedDriver(config, engine.step)
    with fixed_lengths(NUM_SPECULATIVE_TOKENS):
        for handle in (0, 1):  # the second one finds the blocks of the first
            driver.add(handle, prompt, max_tokens=12, ignore_eos=True, temperature=0.0)
            driver.run(2)
    driver.empty_ranks()
    assert driver.finishes[1].num_cached_tokens > 0
    assert check_drafts(reference_type(head, transformers_model(engine))) > 4


@pytest.mark.parametrize(("kind", "pp"), [("eagle3", 1), ("mtp", 1), ("mtp", 2)])
def test_drafts_are_verified_with_the_adapter(
    kind: str, pp: int, make_head: Any, make_model: Callable[..., Path], make_engine: Any, tmp_path: Path
) -> None:
    """The heads share the embedding and the LM head of the target, without the adapters of these."""
    target, speculative, _ = make_head(kind)
    base = make_model("llama")
    path = write_adapter(tmp_path / "adapter", base, (*ATTENTION, *VOCABULARY), size=2, seed=1)
    references = [Reference(base), Reference(merge(tmp_path / "merged", base, path))]
    engine = make_engine(
        target,
        1,
        num_blocks=NUM_BLOCKS,
        pp=pp,
        max_model_len=128,
        speculative=speculative,
        lora=LoraConfig(max_loras=1, max_lora_rank=8, max_cpu_loras=1),
    )
    driver = RankedDriver(engine.config.with_num_blocks(NUM_BLOCKS), engine.step)
    for handle, lora in enumerate((None, LoraReference("own", str(path)))):
        driver.add(handle, PROMPTS[1], max_tokens=16, ignore_eos=True, temperature=0.0, lora=lora)
    driver.run(2)
    assert driver.scheduler.stats.num_draft_tokens > 0
    assert driver.outputs[0] != driver.outputs[1]
    for handle, reference in enumerate(references):
        reference.check_greedy(PROMPTS[1], driver.outputs[handle])
