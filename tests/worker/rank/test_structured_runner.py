"""Constrained rows of the ModelRunner: the same tokens on any number of ranks, each with its part of the masks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranked_driver import RankedDriver

from quire.proto.block_tables import IntArray
from quire.proto.step import FailedRow, NewSequence, RowSampling
from quire.proto.structured_outputs import OutputConstraint
from quire.scheduler.speculation.jump_forward import JumpForward
from quire.worker.comm.shard import Shard
from quire.worker.structured.compilation import GrammarLibrary
from quire.worker.structured.constraint_state import ConstraintState
from quire.worker.structured.grammar import GrammarSpec, Matcher

PROMPT = [11, 52, 173, 94]
PATTERN = "([a-z]{2}[0-9]){40,}"
FORCED_PATTERN = "(the ship is [a-z]; its captain said: ){6}"


def settings_of(library: GrammarLibrary) -> list[RowSampling]:
    compiled = library.compile(GrammarSpec("regex", PATTERN))
    constrained = RowSampling(seed=5, constraint=OutputConstraint(len(PROMPT), compiled))
    return [
        constrained,
        RowSampling(seed=5),
        replace(constrained, temperature=0.0),
        replace(constrained, top_k=40, top_p=0.9, seed=7),
    ]


def test_constrained_rows_get_the_same_tokens_on_any_number_of_ranks(
    make_model: Callable[..., Path], make_engine: Any, planned: Any
) -> None:
    folder = make_model("llama")
    outputs: dict[int, list[list[int]]] = {}
    for tp in (1, 2, 4):
        engine = make_engine(folder, tp)
        model = engine.config.model
        library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
        sequences = [planned(PROMPT, 24, sampling) for sampling in settings_of(library)]
        engine.generate(sequences)
        outputs[tp] = [sequence.generated for sequence in sequences]
    assert outputs[1] == outputs[2] == outputs[4]
    for index in (0, 2, 3):
        text = b"".join(library.vocabulary.pieces[token_id] for token_id in outputs[1][index]).decode()
        assert re.fullmatch("([a-z]{2}[0-9])*[a-z]{0,2}", text), text
    assert outputs[1][1] != outputs[1][0]


@pytest.mark.parametrize("enable_dp_attention", [False, True])
def test_jump_forward_takes_fewer_steps_of_the_same_tokens(
    make_model: Callable[..., Path],
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    enable_dp_attention: bool,
) -> None:
    monkeypatch.setattr(
        JumpForward, "observe_step", lambda *args, **kwargs: None
    )  # which depends on the load
    engine = make_engine(
        make_model("deepseek_v3", seed=7), 2, num_blocks=64, block_size=4, max_model_len=128,
        enable_dp_attention=enable_dp_attention,
    )  # fmt: skip
    model = engine.config.model
    library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
    constraint = OutputConstraint(len(PROMPT), library.compile(GrammarSpec("regex", FORCED_PATTERN)))
    num_steps, outputs = [], []
    for choose in (lambda *args: None, JumpForward.choose):
        monkeypatch.setattr(JumpForward, "choose", choose)
        driver = RankedDriver(engine.config.with_num_blocks(64), engine.step)
        for handle in range(3):
            driver.add(handle, PROMPT, max_tokens=40, temperature=0.8, seed=handle, constraint=constraint)
        driver.run()
        num_steps.append(len(driver.plans))
        outputs.append(driver.outputs)
        driver.empty_ranks()
    assert outputs[0] == outputs[1]
    assert num_steps[1] < 0.7 * num_steps[0]
    for token_ids in outputs[1].values():
        text = b"".join(library.vocabulary.pieces[token_id] for token_id in token_ids).decode()
        assert text.startswith("the ship is ")


@pytest.mark.parametrize("stage", ["fill_mask", "accept"])
def test_failing_constraint_is_reported_and_other_rows_are_unchanged(
    make_model: Callable[..., Path],
    make_engine: Any,
    planned: Any,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
) -> None:
    engine = make_engine(make_model("llama"), 2)
    model = engine.config.model
    settings = settings_of(GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids))
    whole, others = ([planned(PROMPT, 12, sampling) for sampling in settings] for _ in range(2))
    engine.generate(whole)
    reported: list[FailedRow] = []
    for runner in engine.runners:
        constraints = runner.memory.rows.logits_processors._constraints
        monkeypatch.setattr(constraints, "put", planted(constraints, stage))
        monkeypatch.setattr(runner, "launch", recorded(runner, reported))
    engine.generate(others)
    assert reported == [FailedRow(0, "structured_outputs", "planted")] * 2
    assert [own.generated for own in others[1:]] == [own.generated for own in whole[1:]]


class FailingMatcher:
    """A matcher, one of whose methods raises."""

    def __init__(self, matcher: Matcher | None, stage: str) -> None:
        self._matcher, self._stage = matcher, stage

    def __getattr__(self, name: str) -> Any:
        if name == self._stage:
            raise ValueError("planted")
        return getattr(self._matcher, name)

    @staticmethod
    def fill_masks(matchers: Sequence[FailingMatcher], words: IntArray, places: list[int]) -> None:
        for matcher, place in zip(matchers, places, strict=True):
            matcher.fill_mask(words[place])


def planted(constraints: ConstraintState, stage: str) -> Callable[[Any], None]:
    """Return `put`, after which a method of the matcher of row 0's constraint raises."""
    put = constraints.put

    def put_failing(sequence: Any) -> None:
        put(sequence)
        if sequence.row == 0 and (constraint := constraints._rows[0]) is not None:
            constraint._matcher = FailingMatcher(constraint._matcher, stage)

    return put_failing


def recorded(runner: Any, reported: list[FailedRow]) -> Callable[[Any], Any]:
    """Return `launch`, which keeps the failures that it reports."""
    launch = runner.launch

    def launch_recorded(plan: Any) -> Any:
        step = launch(plan)
        reported.extend(step.launched.failed_rows)
        return step

    return launch_recorded


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_masks_of_ranks_are_the_parts_of_one(
    make_model: Callable[..., Path], make_engine: Any, size: int
) -> None:
    model = make_engine(make_model("llama"), 1).config.model
    words = np.random.default_rng(0).integers(-(2**31), 2**31, -(-model.vocab_size // 32), dtype=np.int32)
    whole = np.unpackbits(words.view(np.uint8), bitorder="little")[: model.vocab_size]
    parts = []
    for rank in range(size):
        shard = Shard(rank, size, model.vocab_size)
        local = ConstraintState(model, shard, 1)._local(words.reshape(1, -1))[0]
        parts.append(np.unpackbits(local.view(np.uint8), bitorder="little")[: len(shard)])
    assert np.array_equal(np.concatenate(parts), whole)


def test_empty_mask_allows_the_end_of_the_output(make_model: Callable[..., Path], make_engine: Any) -> None:
    model = make_engine(make_model("llama"), 1).config.model
    state = ConstraintState(model, Shard(0, 1, model.vocab_size), 1)
    words = np.zeros((3, -(-model.vocab_size // 32)), dtype=np.int32)
    words[1] = -1
    words[2, 0] = 1 << 5
    assert state._complete(words) == [0]
    ids = np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))
    assert tuple(ids) == model.eos_token_ids
    assert words[2].tolist() == [1 << 5] + [0] * (words.shape[1] - 1)


def test_forked_beam_copies_the_state_of_its_parent(
    make_model: Callable[..., Path], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's last token is not read back yet when the beam starts."""
    model = make_engine(make_model("llama"), 1).config.model
    library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
    sampling = settings_of(library)[0]
    first, last, other = (library.vocabulary.encode(text)[0] for text in ("a", "b", "c"))
    state = ConstraintState(model, Shard(0, 1, model.vocab_size), 3)
    state.put(new_sequence(2, first, other, sampling=sampling))
    state.put(new_sequence(0, first, sampling=sampling))
    state.append(np.array([0], np.int32), torch.tensor([last], dtype=torch.int32))
    with monkeypatch.context() as patch:
        patch.setattr(state, "_replay", None)
        state.put(new_sequence(1, first, other, sampling=FORKED, source_row=0))
        assert masks_of(state)[1] == masks_of(state)[2] == masks_of(state)[0]
    state.replace_newest(np.array([0], np.int32), np.array([first], np.int32))
    digits = library.vocabulary.encode("7")
    state.append(np.array([1], np.int32), torch.tensor(digits[:1], dtype=torch.int32))
    forked, parent = masks_of(state)[1], masks_of(state)[0]
    assert forked != parent


def test_output_forked_after_the_prompt_starts_at_the_root(
    make_model: Callable[..., Path], make_engine: Any
) -> None:
    """Its parent may have many tokens by then, or a matcher that has failed and is reported."""
    model = make_engine(make_model("llama"), 1).config.model
    library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
    sampling = settings_of(library)[0]
    state = ConstraintState(model, Shard(0, 1, model.vocab_size), 4)
    letter, digit = (library.vocabulary.encode(text)[0] for text in ("a", "7"))
    state.put(new_sequence(0, sampling=sampling))
    state.put(new_sequence(1, *[letter, letter, digit] * 30, sampling=sampling))
    state.put(new_sequence(2, sampling=FORKED, source_row=1))
    state._fail(1, "planted")
    state.put(new_sequence(3, sampling=FORKED, source_row=1))
    root, forked, forked_later = masks_of(state, 0, 2, 3)
    assert root == forked == forked_later


def test_fork_of_a_row_without_a_constraint_is_refused(
    make_model: Callable[..., Path], make_engine: Any
) -> None:
    model = make_engine(make_model("llama"), 1).config.model
    state = ConstraintState(model, Shard(0, 1, model.vocab_size), 2)
    with pytest.raises(ValueError, match="row 1 is to have the constraint of row 0, which has none"):
        state.put(new_sequence(1, sampling=FORKED, source_row=0))


FORKED = RowSampling(seed=5)


def new_sequence(row: int, *output: int, sampling: RowSampling, source_row: int | None = None) -> NewSequence:
    token_ids = np.array([*PROMPT, *output], np.int32)
    no_blocks = np.zeros(0, np.int32)
    return NewSequence(
        row,
        row,
        token_ids,
        0,
        no_blocks,
        sampling,
        source_row=source_row,
        takes_constraint=source_row is not None,
    )


def masks_of(state: ConstraintState, *rows: int) -> list[list[int]]:
    """Return the masks of rows, by default of the first three."""
    asked = np.array(rows or (0, 1, 2), dtype=np.int32)
    words: list[list[int]] = state.masks(asked, lambda first_index, count: []).words.tolist()
    return words
