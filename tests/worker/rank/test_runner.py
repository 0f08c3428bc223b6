"""ModelRunner: the step contract with the scheduler, and errors for invalid plans."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quire.worker.rank.loaded_model as loaded_model
from quire.proto.block_tables import BlockTables
from quire.proto.errors import ConfigError, RankFailed
from quire.proto.state_memory import DEFAULT_CPU_KV_BYTES
from quire.proto.step import NewSequence, RowSampling, StepPlan
from quire.worker.comm.communicator import SingleRank
from quire.worker.rank.runner import ModelRunner

GREEDY = RowSampling(temperature=0.0)
PROMPT = [11, 52, 173, 94, 35, 216, 77, 118, 9, 310, 21]


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


class Script:
    """Hand-written plans; keeps block tables like the scheduler, so that each plan has the right digest."""

    def __init__(self, runner: ModelRunner, num_rows: int, max_blocks: int) -> None:
        self.runner = runner
        self.tables = BlockTables(num_rows, max_blocks)
        self.step_id = 0

    def step(
        self, new: tuple[NewSequence, ...] = (), appended: tuple[tuple[int, int], ...] = (), **fields: Any
    ) -> list[int]:
        """Execute a plan and return the sampled tokens."""
        self.step_id += 1
        self.tables.release(fields.get("released_rows", ints()))
        for sequence in new:
            self.tables.append(np.full_like(sequence.block_ids, sequence.row), sequence.block_ids)
        rows, ids = ints(*(row for row, _ in appended)), ints(*(block for _, block in appended))
        self.tables.append(rows, ids)
        plan = StepPlan(
            self.step_id, 1, self.tables.digest, new=new, appended_rows=rows, appended_ids=ids, **fields
        )
        tokens: list[int] = self.runner.execute(plan).token_ids.tolist()
        return tokens


def sequence(
    row: int, token_ids: list[int], block_ids: tuple[int, ...], num_computed: int = 0
) -> NewSequence:
    return NewSequence(row, row, ints(*token_ids), num_computed, ints(*block_ids), GREEDY)


def chunks(*pairs: tuple[int, int]) -> dict[str, Any]:
    return {"chunk_rows": ints(*(row for row, _ in pairs)), "chunk_lens": ints(*(n for _, n in pairs))}


@pytest.fixture
def script(make_model: Any, engine_config: Any) -> Script:
    config = engine_config(make_model("llama"), block_size=4, max_num_seqs=4, max_model_len=64)
    runner = ModelRunner(config, SingleRank())
    runner.allocate_cache(32)
    return Script(runner, 4, config.max_blocks_per_seq)


@pytest.fixture
def alone(script: Script) -> list[int]:
    """The first 6 greedy tokens after PROMPT."""
    tokens = script.step((sequence(0, PROMPT, (1, 2, 3)),), **chunks((0, 11)))
    tokens += script.step()  # the 12th token fills the third block
    tokens += script.step(appended=((0, 4),))
    tokens += [token for _ in range(3) for token in script.step()]
    script.step(released_rows=ints(0))
    return tokens


def test_cached_prefix_is_not_computed_again(script: Script, alone: list[int]) -> None:
    # Blocks 1 and 2 still hold the first 8 tokens.
    assert script.step((sequence(2, PROMPT, (1, 2, 7), num_computed=8),), **chunks((2, 3))) == alone[:1]
    assert script.step() == alone[1:2]


def test_prefix_written_in_same_step_can_be_read(script: Script, alone: list[int]) -> None:
    # Row 1 reads blocks 8 and 9, which row 3 writes in the same step; row 1 comes first in the batch.
    new = sequence(3, PROMPT, (8, 9, 10)), sequence(1, PROMPT, (8, 9, 11), num_computed=8)
    assert script.step(new, **chunks((1, 3), (3, 11))) == [alone[0], alone[0]]


def test_copied_blocks_have_same_contents(script: Script, alone: list[int]) -> None:
    copies = np.array([(1, 21), (2, 22)], dtype=np.int32)
    new = sequence(0, PROMPT, (21, 22, 23), num_computed=8)
    assert script.step((new,), copies=copies, **chunks((0, 3))) == alone[:1]


def test_held_rows_do_not_compute(script: Script, alone: list[int]) -> None:
    new = sequence(0, PROMPT, (5, 6, 7)), sequence(1, PROMPT, (8, 9, 10))
    assert script.step(new, **chunks((0, 11), (1, 11))) == [alone[0]] * 2
    assert script.step(held_rows=ints(0)) == [alone[1]]
    assert script.step(appended=((1, 11),)) == [alone[1], alone[2]]
    assert script.step(held_rows=ints(0, 1)) == []


def test_sampled_tokens_are_in_ascending_row_order(script: Script, alone: list[int]) -> None:
    script.step((sequence(3, PROMPT, (5, 6, 7)),), **chunks((3, 11)))
    new = sequence(2, [300, 4], (8,)), sequence(0, PROMPT, (9, 10, 11))
    first = script.step(new, **chunks((0, 11), (2, 2)))
    assert (first[0], first[2]) == (alone[0], alone[1])


def test_resumed_sequence_continues_with_same_tokens(script: Script, alone: list[int]) -> None:
    new = sequence(1, PROMPT + alone[:3], (14, 15, 16, 17))
    assert script.step((new,), **chunks((1, 9))) == []
    assert script.step(**chunks((1, 5))) == alone[3:4]


def test_empty_plan_returns_empty_result(script: Script) -> None:
    assert script.step() == []
    assert script.runner.stage == "idle"


def test_stage_times_are_reported(script: Script) -> None:
    script.step((sequence(0, PROMPT, (1, 2, 3)),), **chunks((0, 11)))
    result = script.runner.execute(StepPlan(2, 1, script.tables.digest))
    assert set(result.stage_times) == {"apply", "forward", "sample"}
    assert all(seconds > 0 for seconds in result.stage_times.values())


def test_wrong_digest_fails_before_computing(script: Script) -> None:
    script.step((sequence(0, PROMPT, (1, 2, 3)),), **chunks((0, 11)))
    with pytest.raises(
        RankFailed, match=r"rank 0 failed at step 7 in stage apply: .* digest .* the scheduler's"
    ):
        script.runner.execute(StepPlan(7, 1, script.tables.digest ^ 1))
    assert script.runner.stage == "apply"


def test_failure_reason_is_one_short_line(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's errors contain a C++ stack, and the reason goes into a gRPC trailer."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel " + 9000 * "x" + "\nException raised from at::empty\nframe #0")

    monkeypatch.setattr(script.runner.memory.loaded.model, "forward", fail)
    with pytest.raises(RankFailed, match=r"in stage forward: RuntimeError: no kernel x+$") as caught:
        script.step((sequence(0, PROMPT, (1, 2, 3)),), **chunks((0, 11)))
    assert len(caught.value.problem) < 600


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (chunks((0, 12)), "more tokens than it has for row 0"),
        (chunks((0, 0)), "an empty chunk for row 0"),
        (chunks((3, 1)), "more tokens than it has for row 3"),
    ],
)
def test_plan_out_of_range_raises(script: Script, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        script.step((sequence(0, PROMPT, (1, 2, 3)),), **fields)


def test_missing_blocks_raise(script: Script) -> None:
    with pytest.raises(RankFailed, match="more tokens than its blocks hold for row 0"):
        script.step((sequence(0, PROMPT, (1, 2)),), **chunks((0, 11)))


def test_unused_slots_do_not_affect_tokens(script: Script, alone: list[int]) -> None:
    for layer in script.runner.memory.kv.cache.layers:
        layer.blocks.fill_(torch.nan)
    other = sequence(1, PROMPT[:2], (20,))
    tokens = script.step((sequence(0, PROMPT, (5, 6, 7)), other), **chunks((0, 11), (1, 2)))
    assert tokens[0] == alone[0]
    assert script.step()[0] == alone[1]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_num_blocks_that_fit_counts_bytes(make_model: Any, engine_config: Any, tp: int) -> None:
    class FakeComm(SingleRank):
        size = tp

    # 3 layers, keys and values, 4 KV heads of 16 float32 numbers, blocks of 16 tokens.
    block_bytes = 3 * 2 * 4 * 16 * 4 * 16 // tp
    config = engine_config(make_model("llama"), tp)
    assert ModelRunner(config, FakeComm()).num_blocks_that_fit() == DEFAULT_CPU_KV_BYTES // block_bytes
    config = replace(config, cache=replace(config.cache, kv_cache_memory=10 * block_bytes + 1))
    assert ModelRunner(config, FakeComm()).num_blocks_that_fit() == 10
    assert ModelRunner(config.with_num_blocks(5), FakeComm()).num_blocks_that_fit() == 5


def test_kv_cache_beyond_memory_raises_config_error(make_model: Any, engine_config: Any) -> None:
    runner = ModelRunner(engine_config(make_model("llama")), SingleRank())
    with pytest.raises(ConfigError, match=r"rank 0 cannot allocate \d+\.\d+ GiB of KV memory"):
        runner.allocate_cache(1 << 40)


def test_host_blocks_beyond_memory_raise_config_error(make_model: Any, engine_config: Any) -> None:
    config = engine_config(make_model("llama"))
    config = replace(config, cache=replace(config.cache, num_host_kv_blocks=1 << 40))
    with pytest.raises(ConfigError, match=r"KV memory and \d+\.\d+ GiB for what is swapped"):
        ModelRunner(config, SingleRank()).allocate_cache(2)


def test_model_beyond_memory_raises_config_error(
    make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate_too_much(*_: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(loaded_model, "load_model", allocate_too_much)
    with pytest.raises(ConfigError, match="does not fit into the memory of rank 0"):
        ModelRunner(engine_config(make_model("llama")), SingleRank())


def test_loaded_model_keeps_no_files_open(make_model: Any, engine_config: Any) -> None:
    for kind in ("llama", "gpt2"):
        folder = make_model(kind)
        runner = ModelRunner(engine_config(folder), SingleRank())
        open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert not [name for name in open_files if name.startswith(str(folder))]
        runner.close()


def test_bfloat16_runs_on_cpu(make_model: Any, engine_config: Any) -> None:
    config = engine_config(make_model("qwen3"), block_size=4)
    runner = ModelRunner(replace(config, model=replace(config.model, dtype="bfloat16")), SingleRank())
    runner.allocate_cache(8)
    script = Script(runner, 8, config.max_blocks_per_seq)
    assert len(script.step((sequence(0, PROMPT, (1, 2, 3)),), **chunks((0, 11)))) == 1
    assert len(script.step()) == 1


def test_runner_that_compiles_a_kernel_says_so(make_engine: Any, make_model: Any) -> None:
    """From Triton's hook before a compilation to the one after it, or to the reset after one that failed."""
    triton = pytest.importorskip("triton")
    from quire.kernels.gpu import compilations

    compilations.count_compilations()
    (runner,) = make_engine(make_model("llama")).runners
    knobs = triton.knobs.runtime
    seen = [runner.stage]
    for end in (knobs.jit_post_compile_hook, lambda **_: runner.reset(has_new_ranks=False)):
        assert not knobs.jit_cache_hook()
        seen.append(runner.stage)
        end()
        seen.append(runner.stage)
    assert seen == ["idle", "compile", "idle", "compile", "idle"]
