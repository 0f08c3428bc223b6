"""Other weights and sleep on real ranks, under requests that run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import ATTENTION, VOCABULARY, merge, write_adapter
from draft_heads import add_mtp, write_eagle3
from ranked_driver import RankedDriver
from reference import Reference, prompts_of
from thread_group import ThreadCommunicator

from benchmarks.draft_lengths import fixed_lengths
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.config import LoraConfig, SpeculativeConfig
from quire.proto.engine_command import Action, EngineCommand, SleepTag
from quire.proto.errors import ConfigError
from quire.proto.lora import LoraReference
from quire.proto.step import StepPlan
from quire.worker.rank.loaded_model import ModelLoader
from quire.worker.rank.runner import ModelRunner

PROMPTS = prompts_of([7, 19], seed=6)
CALLER = (b"", 1)


def run_through_commands(driver: RankedDriver, second: Path, num_tokens: int) -> list[int]:
    """Change the weights and sleep amid the requests, which run to their end; return the tokens of each before."""
    while min(len(driver.outputs[handle]) for handle in range(2)) < 4:
        driver.step(depth=2)
    for action in (Action.UPDATE_WEIGHTS, Action.SLEEP, Action.WAKE_UP):
        driver.scheduler.control.order(EngineCommand(action, path=str(second), version="v"), CALLER)
    while driver.scheduler.num_in_flight:
        driver.apply_result()
    lengths = [len(driver.outputs[handle]) for handle in range(2)]
    driver.run(depth=2)
    driver.empty_ranks()
    assert driver.scheduler.control.take_replies() == [(CALLER, "")] * 3
    for handle, length in enumerate(lengths):
        assert 0 < length < len(driver.outputs[handle]) == num_tokens
        assert driver.finishes[handle].weights_version == "v"
    return lengths


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_running_requests_continue_with_the_new_weights(
    make_model: Callable[..., Path], make_engine: Any, tp: int, pp: int
) -> None:
    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    engine = make_engine(first, tp, num_blocks=32, block_size=4, max_model_len=60, pp=pp)
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    for handle, prompt in enumerate(PROMPTS):
        driver.add(handle, prompt, max_tokens=20, ignore_eos=True)
    lengths = run_through_commands(driver, second, 20)
    for handle, prompt in enumerate(PROMPTS):
        output, length = driver.outputs[handle], lengths[handle]
        Reference(first).check_greedy(prompt, output[:length])
        Reference(second).check_greedy(prompt + output[:length], output[length:])


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_requests_with_adapters_continue_with_the_new_weights(
    make_model: Callable[..., Path], make_engine: Any, tmp_path: Path, tp: int, pp: int
) -> None:
    """The ranks drop the adapters with the weights, and read them again before a request goes on."""
    bases = [make_model("llama", seed=seed) for seed in (1, 2)]
    path = write_adapter(tmp_path / "adapter", bases[0], (*ATTENTION, *VOCABULARY), size=2, seed=1)
    merged = [Reference(merge(tmp_path / f"merged{index}", base, path)) for index, base in enumerate(bases)]
    plain = [Reference(base) for base in bases]
    engine = make_engine(
        bases[0],
        tp,
        num_blocks=32,
        block_size=4,
        max_model_len=60,
        pp=pp,
        lora=LoraConfig(max_loras=1, max_lora_rank=8, max_cpu_loras=1),
    )
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    driver.add(0, PROMPTS[0], max_tokens=20, ignore_eos=True, lora=LoraReference("own", str(path)))
    while not driver.outputs[0]:  # a thread of each rank reads the adapter
        driver.step(depth=2)
        time.sleep(0.01)
    driver.add(1, PROMPTS[1], max_tokens=20, ignore_eos=True)
    lengths = run_through_commands(driver, bases[1], 20)
    for handle, (first, second) in enumerate((merged, plain)):
        prompt, output, length = PROMPTS[handle], driver.outputs[handle], lengths[handle]
        first.check_greedy(prompt, output[:length])
        second.check_greedy(prompt + output[:length], output[length:])
    assert driver.scheduler.lora is not None
    assert driver.scheduler.lora.num_in_memory == 1


@pytest.fixture
def make_speculative(make_model: Callable[..., Path], tmp_path: Path) -> Any:
    """`make_speculative(method) -> (a model, the same with other weights, its SpeculativeConfig)`."""

    def make(method: str) -> tuple[Path, Path, SpeculativeConfig]:
        first, second = (make_model("llama", seed=seed) for seed in (1, 2))
        given: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
        if method == "mtp":
            first = add_mtp(first, tmp_path / "first", mimo=False)
        elif method == "draft_model":
            given["model"] = str(second)
        elif method == "eagle3":
            vocab_size = json.loads((first / "config.json").read_text())["vocab_size"]
            given["model"] = str(write_eagle3(tmp_path / "head", vocab_size, num_layers=3))
        options = EngineOptions(
            str(first), speculative_config=json.dumps(given), dtype="float32", max_model_len=60
        )
        config = resolve(options, Machine(1, 0)).speculative
        assert config is not None
        return first, second, config

    return make


@pytest.mark.parametrize(
    ("method", "tp"), [("ngram", 1), ("draft_model", 1), ("draft_model", 2), ("eagle3", 2), ("mtp", 1)]
)
def test_drafts_go_on_with_the_new_weights(
    make_speculative: Any, make_engine: Any, method: str, tp: int
) -> None:
    """The new weights have no head of their own, as those of trainers; one of multi-token prediction stays."""
    first, second, speculative = make_speculative(method)
    engine = make_engine(first, tp, num_blocks=64, block_size=4, max_model_len=60, speculative=speculative)
    driver = RankedDriver(engine.config.with_num_blocks(64), engine.step)
    for handle, prompt in enumerate(PROMPTS):
        driver.add(handle, 2 * prompt, max_tokens=20, ignore_eos=True)
    with fixed_lengths(2):
        lengths = run_through_commands(driver, second, 20)
    for handle, prompt in enumerate(PROMPTS):
        output, length = driver.outputs[handle], lengths[handle]
        Reference(first).check_greedy(2 * prompt, output[:length])
        Reference(second).check_greedy(2 * prompt + output[:length], output[length:])
    assert driver.scheduler.stats.num_draft_tokens > 0


def command_ranks(engine: Any, command: EngineCommand) -> set[str]:
    """Have the ranks carry out a command without a scheduler; return their errors."""
    plan = StepPlan(0, 0, engine.runners[0].memory.rows.tables.digest, command=command)
    return {
        result.command_error for result in engine.on_all(lambda runner: runner.execute(plan), engine.runners)
    }


def wake_up(*tags: SleepTag) -> EngineCommand:
    return EngineCommand(Action.WAKE_UP, tags=tags)


def update(path: Path) -> EngineCommand:
    return EngineCommand(Action.UPDATE_WEIGHTS, path=str(path), version="v")


def check_greedy(engine: Any, folder: Path) -> None:
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    for handle, prompt in enumerate(PROMPTS):
        driver.add(handle, prompt, max_tokens=8, ignore_eos=True)
    driver.run()
    for handle, prompt in enumerate(PROMPTS):
        Reference(folder).check_greedy(prompt, driver.outputs[handle])
    driver.empty_ranks()


WEIGHTS, KV_CACHE = SleepTag
SLEEP = EngineCommand(Action.SLEEP)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("parts", [(WEIGHTS, KV_CACHE), (KV_CACHE, WEIGHTS)])
def test_ranks_wake_in_parts(
    make_model: Callable[..., Path], make_engine: Any, parts: tuple[SleepTag, SleepTag], tp: int
) -> None:
    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    engine = make_engine(first, tp, num_blocks=32, block_size=4)
    assert command_ranks(engine, SLEEP) == {""}
    assert all(runner.memory.parts == set() for runner in engine.runners)
    assert command_ranks(engine, wake_up(parts[0])) == {""}
    assert all(runner.memory.parts == {parts[0]} for runner in engine.runners)
    assert command_ranks(engine, update(second)) == {""}
    assert all(runner.memory.parts == {parts[0]} for runner in engine.runners)
    assert command_ranks(engine, wake_up(parts[1])) == {""}
    check_greedy(engine, second)
    assert command_ranks(engine, wake_up()) == {""}
    check_greedy(engine, second)


def test_discarded_weights_are_loaded_when_others_are_named(
    make_model: Callable[..., Path], make_engine: Any
) -> None:
    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    engine = make_engine(first, num_blocks=32, block_size=4)
    (runner,) = engine.runners
    for command, parts in (
        (EngineCommand(Action.SLEEP, level=2), set()),
        (wake_up(WEIGHTS), set()),
        (update(second), {WEIGHTS}),
        (wake_up(KV_CACHE), {WEIGHTS, KV_CACHE}),
    ):
        assert command_ranks(engine, command) == {""}
        assert runner.memory.parts == parts
    check_greedy(engine, second)


@pytest.mark.parametrize("part", [WEIGHTS, KV_CACHE])
def test_ranks_wake_together_or_sleep_on(
    make_model: Callable[..., Path], make_engine: Any, monkeypatch: pytest.MonkeyPatch, part: SleepTag
) -> None:
    folder = make_model("llama", seed=1)
    engine = make_engine(folder, 2, num_blocks=32, block_size=4)

    def fail(*_: Any) -> None:
        raise ConfigError("rank 1 has no memory left")

    command_ranks(engine, SLEEP)
    with monkeypatch.context() as patch:
        memory = engine.runners[1].memory
        if part is WEIGHTS:
            patch.setattr(memory.loader, "load", fail)
        else:
            patch.setattr(memory.kv, "allocate", fail)
        errors = command_ranks(engine, wake_up())
        assert errors == {
            "rank 1 has no memory left",
            "another rank lacks memory, or cannot read the weights",
        }
        assert all(runner.memory.parts == set() for runner in engine.runners)
        (other,) = set(SleepTag) - {part}
        assert command_ranks(engine, wake_up(other)) == {""}
        assert "rank 1 has no memory left" in command_ranks(engine, wake_up(part))
        assert all(runner.memory.parts == {other} for runner in engine.runners)
    assert command_ranks(engine, wake_up(part)) == {""}
    check_greedy(engine, folder)


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_ranks_of_a_new_group_wake(
    make_model: Callable[..., Path], make_engine: Any, level: int
) -> None:
    folder = make_model("llama", seed=1)
    engine = make_engine(folder, 2, num_blocks=32, block_size=4)
    command_ranks(engine, EngineCommand(Action.SLEEP, level=level))
    engine.on_all(lambda runner: runner.reset(has_new_ranks=False), engine.runners)
    check_greedy(engine, folder)


def test_head_of_the_new_weights_drafts(
    make_speculative: Any, make_model: Callable[..., Path], make_engine: Any, tmp_path: Path
) -> None:
    first, second, speculative = make_speculative("mtp")
    second = add_mtp(second, tmp_path / "second", mimo=False, seed=5)
    engine = make_engine(first, num_blocks=64, block_size=4, max_model_len=60, speculative=speculative)
    projections = []
    for folder in (first, second, first):
        driver = RankedDriver(engine.config.with_num_blocks(64), engine.step)
        driver.scheduler.control.order(
            EngineCommand(Action.UPDATE_WEIGHTS, path=str(folder), version=folder.name), CALLER
        )
        driver.run()
        head = engine.runners[0].memory.loaded.head.head
        projections.append(head.embedding_norm.clone())
    assert projections[0].equal(projections[2])
    assert not projections[0].equal(projections[1])


def test_ranks_refuse_weights_together(make_model: Callable[..., Path], make_engine: Any) -> None:
    folder = make_model("llama", seed=1)
    engine = make_engine(folder, 2, num_blocks=32, block_size=4)
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    missing = EngineCommand(Action.UPDATE_WEIGHTS, path=str(folder / "missing"), version="v")
    driver.add(0, PROMPTS[0], max_tokens=8, ignore_eos=True)
    for _ in range(4):
        driver.step()
    driver.scheduler.control.order(missing, CALLER)
    driver.run()
    ((_, error),) = driver.scheduler.control.take_replies()
    assert "missing" in error
    Reference(folder).check_greedy(PROMPTS[0], driver.outputs[0])


@pytest.mark.parametrize("is_other", [False, True], ids=["same files", "other files"])
def test_rank_is_replaced_only_with_the_weights_of_the_others(
    make_model: Callable[..., Path], make_engine: Any, tmp_path: Path, is_other: bool
) -> None:
    folder = shutil.copytree(make_model("llama", seed=1), tmp_path / "served")
    engine = make_engine(folder, 2, num_blocks=32, block_size=4)
    source = make_model("llama", seed=2 if is_other else 1)
    os.replace(shutil.copy(source / "model.safetensors", tmp_path), folder / "model.safetensors")

    def rejoin(rank: int) -> str:
        try:
            if rank == 0:
                engine.runners[0].reset(has_new_ranks=True)
            else:
                engine.runners[1].close()
                engine.runners[1] = ModelRunner(engine.config, engine._group.communicator(1))
                engine.runners[1].allocate_cache(32)
        except ConfigError as error:
            return str(error)
        return ""

    errors = set(engine.on_all(rejoin, range(2)))
    if is_other:
        assert len(errors) == 1
        assert "rank 1 has read other weights than rank 0: the files in" in errors.pop()
    else:
        assert errors == {""}
        check_greedy(engine, folder)


def test_ranks_meet_after_they_have_read_weights(
    make_model: Callable[..., Path], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may read for minutes longer than the other, and NCCL's watchdog ends a rank whose collective waits."""
    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    engine = make_engine(first, 2, num_blocks=32, block_size=4, max_model_len=60)
    driver = RankedDriver(engine.config.with_num_blocks(32), engine.step)
    driver.add(0, PROMPTS[0], max_tokens=20, ignore_eos=True)
    driver.add(1, PROMPTS[1], max_tokens=20, ignore_eos=True)
    events: dict[int, list[str]] = {0: [], 1: []}  # rank |-> what it did, in order

    def note(kind: type[Any], method: str, rank_of: Callable[[Any], int]) -> None:
        call = getattr(kind, method)

        def noted(self: Any, *arguments: Any) -> Any:
            events[rank_of(self)].append(method)
            return call(self, *arguments)

        monkeypatch.setattr(kind, method, noted)

    note(ModelLoader, "load", lambda loader: int(loader._pipeline.rank))
    for method in ("meet", "all_gather", "all_reduce"):
        note(ThreadCommunicator, method, lambda comm: int(comm.rank))
    run_through_commands(driver, second, 20)
    for own in events.values():
        assert own.count("load") == 2  # of the update and of the wake
        assert [after for before, after in itertools.pairwise(own) if before == "load"] == ["meet"] * 2
