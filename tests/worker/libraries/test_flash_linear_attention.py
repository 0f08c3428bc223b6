"""Delta rules by flash-linear-attention, through functions with its recorded signatures."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_fla import FakeFla
from state_kinds import STATE_KINDS
from torch import Tensor

from quire.kernels.recurrence import linear_attention
from quire.kernels.state_runs import StateRuns
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError
from quire.worker.libraries.flash_linear_attention import CHUNK_LEN, FlashLinearAttention
from quire.worker.libraries.installed import Library
from quire.worker.libraries.recurrence_backend import OWN_RECURRENCE, choose_recurrence, log_recurrence

GPU = torch.device("cuda", 0)


def make_runs(lens: list[int], **others: Any) -> StateRuns:
    """Return runs of these tokens, of which every second one begins its sequence; their slots are not in order."""
    slots = torch.arange(len(lens), 0, -1, dtype=torch.int32)
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    return StateRuns(slots, starts, slots % 2 == 0, max(lens), **others)


def make_inputs(num_tokens: int, *, per_channel: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(3)
    key_heads, heads = (4, 4) if per_channel else (2, 4)
    decay_shape = (num_tokens, heads, 16) if per_channel else (num_tokens, heads)
    return {
        "q": F.normalize(torch.randn(num_tokens, key_heads, 16), dim=-1).to(dtype),
        "k": F.normalize(torch.randn(num_tokens, key_heads, 16), dim=-1).to(dtype),
        "v": torch.randn(num_tokens, heads, 24).to(dtype),
        "log_decay": F.logsigmoid(torch.randn(decay_shape)),
        "beta": torch.rand(num_tokens, heads),
        "states": torch.randn(5, heads, 16, 24),
    }


def attend(inputs: dict[str, Any], runs: StateRuns) -> Tensor:
    """Return the result of quire's op, whose first argument has no keyword."""
    others = {name: each for name, each in inputs.items() if name != "q"}
    return linear_attention(inputs["q"], runs=runs, scale=0.25, **others)


def make_backend() -> tuple[FlashLinearAttention, FakeFla]:
    fake = FakeFla()
    return FlashLinearAttention(fake.chunk_gated_delta_rule, fake.chunk_kda), fake


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_prompts_equal_own_kernels(per_channel: bool, state_dtype: torch.dtype) -> None:
    backend, fake = make_backend()
    runs = make_runs([CHUNK_LEN + 3, 1, 70, 2])
    inputs = make_inputs(int(runs.starts[-1]), per_channel=per_channel)
    inputs["states"] = inputs["states"].to(state_dtype)
    inputs["states"][runs.slots[runs.is_new].long()] = torch.nan  # what others have left there
    own = inputs | {"states": inputs["states"].clone()}
    found = backend.delta_rule(**inputs, runs=runs, scale=0.25)
    expected = attend(own, runs)
    torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.02)
    tolerance = 2e-3 if state_dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        inputs["states"], own["states"], atol=tolerance, rtol=tolerance, equal_nan=True
    )
    assert (fake.num_calls, backend.num_calls, backend.num_others) == (1, 1, 0)


@pytest.mark.parametrize(
    ("lens", "others", "dtype"),
    [
        ([1, 1, 1], {}, torch.bfloat16),
        ([CHUNK_LEN - 1], {}, torch.bfloat16),
        ([CHUNK_LEN], {"stores": torch.tensor([False]), "calls": []}, torch.bfloat16),
        ([CHUNK_LEN], {}, torch.float32),
    ],
    ids=["decodes", "short", "drafts", "float32"],
)
def test_other_steps_use_own_kernels(lens: list[int], others: dict[str, Any], dtype: torch.dtype) -> None:
    backend, fake = make_backend()
    runs = make_runs(lens, **others)
    inputs = make_inputs(sum(lens), per_channel=False, dtype=dtype)
    own = inputs | {"states": inputs["states"].clone()}
    found = backend.delta_rule(**inputs, runs=runs, scale=0.25)
    assert torch.equal(found, attend(own, runs))
    assert torch.equal(inputs["states"], own["states"])
    assert (fake.num_calls, backend.num_others) == (0, 1)


def test_layers_of_a_step_share_the_starts() -> None:
    """The library reads them once, since it keeps what it read of a tensor."""
    seen = []

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["cu_seqlens"])
        return FakeFla().chunk_gated_delta_rule(*args, **kwargs)

    backend, runs = FlashLinearAttention(note, note), make_runs([CHUNK_LEN])
    for _ in range(2):
        backend.delta_rule(**make_inputs(CHUNK_LEN, per_channel=False), runs=runs, scale=1.0)
    backend.delta_rule(**make_inputs(CHUNK_LEN, per_channel=False), runs=make_runs([CHUNK_LEN]), scale=1.0)
    assert seen[0] is seen[1]
    assert seen[2] is not seen[0]


def test_cut_runs_equal_own_kernels() -> None:
    """The first parts of all runs have gaps between them; the second parts are short."""
    backend, fake = make_backend()
    lens = [CHUNK_LEN + 9, 3, CHUNK_LEN + 6]
    tails = torch.tensor([sum(lens) - 2, sum(lens) - 1])
    cut = make_runs(lens).cut(
        torch.tensor([0, 2]), torch.tensor([CHUNK_LEN, CHUNK_LEN + 4], dtype=torch.int32),
        torch.tensor([4, 0]), torch.cat((torch.arange(CHUNK_LEN, lens[0]), tails)), 9,
    )  # fmt: skip
    results = []
    for rule in (backend.delta_rule, linear_attention):
        inputs = make_inputs(sum(lens), per_channel=False)
        states = inputs.pop("states")
        results.append((cut.compute(rule, *inputs.values(), states=states, scale=0.25), states))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.02)
    assert fake.num_calls == 1


@pytest.fixture
def make_config(make_model: Any, engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Library, "version", "0.5.2")
    monkeypatch.setattr(FlashLinearAttention, "load", classmethod(lambda cls, device: make_backend()[0]))

    def make(kind: str, wanted: str, dtype: str = "bfloat16") -> EngineConfig:
        folder = make_model(kind, seed=7, **STATE_KINDS.get(kind, {}))
        slots = 8 if kind in STATE_KINDS else None
        made: EngineConfig = engine_config(folder, device="cuda", dtype=dtype, num_state_slots=slots)
        return replace(made, parallel=replace(made.parallel, linear_attention_backend=wanted))

    return make


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear", "bailing_hybrid", "olmo_hybrid"])
def test_library_is_chosen_for_delta_rules_and_logged(
    kind: str, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend = choose_recurrence(make_config(kind, "fla"), GPU)
    assert isinstance(backend, FlashLinearAttention)
    with caplog.at_level(logging.INFO, logger="quire"):
        log_recurrence(backend)
        inputs = make_inputs(CHUNK_LEN, per_channel=False)
        backend.delta_rule(**inputs, runs=make_runs([CHUNK_LEN]), scale=1.0)
        log_recurrence(backend)
    assert "delta rules: Triton kernels: no run had the length" in caplog.text
    assert "delta rules: flash-linear-attention in prompts of 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("kind", "dtype", "problem"),
    [
        ("lfm2", "bfloat16", "the model has no layers with a delta rule"),
        ("llama", "bfloat16", "the model has no layers with a delta rule"),
        ("qwen3_next", "float32", "the model's dtype is float32"),
    ],
)
def test_library_that_does_not_fit_is_refused_by_name_and_passed_by_auto(
    kind: str, dtype: str, problem: str, make_config: Any
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"linear_attention_backend is 'fla', but flash-linear-attention cannot be used: {problem}",
    ):
        choose_recurrence(make_config(kind, "fla", dtype), GPU)
    assert choose_recurrence(make_config(kind, "auto", dtype), GPU) is OWN_RECURRENCE
    assert choose_recurrence(make_config("qwen3_next", "triton"), GPU) is OWN_RECURRENCE
