"""Recurrences: C++ ops against the references, and the references against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from quick_cases import diagonal
from torch import Tensor
from torch.nn import functional

from quire.kernels.native import recurrence as native
from quire.kernels.native.library import is_available
from quire.kernels.recurrence import causal_conv, linear_attention, rg_lru, selective_scan
from quire.kernels.state_runs import StateRuns

pytestmark = pytest.mark.usefixtures("two_threads")

NUM_SLOTS = 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=["c++", "pytorch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the C++ ops and with the references."""
    if request.param == "pytorch":
        for name in ("supports_conv", "supports_attention", "supports_scan", "supports_lru"):
            monkeypatch.setattr(native, name, lambda *_: False)
    elif not is_available():
        pytest.skip("there is no C++ compiler")
    return str(request.param)


def make_runs(*lengths: int, slots: tuple[int, ...] = (3, 0, 4, 1), new: tuple[bool, ...] = ()) -> StateRuns:
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    count = len(lengths)
    return StateRuns(
        torch.tensor(slots[:count], dtype=torch.int32),
        torch.cat((torch.zeros(1, dtype=torch.int32), ends)),
        torch.tensor(new or (True,) * count),
        max(lengths),
    )


def attention_inputs(
    num_tokens: int,
    dtype: torch.dtype,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (32, 48),
    per_channel: bool = False,
) -> list[Any]:
    """Return q, k, v, log_decay and beta."""
    key_heads, value_heads = heads
    key_dim, value_dim = dims
    q, k = torch.randn(2, num_tokens, key_heads, key_dim).unbind()
    decay_shape = (num_tokens, value_heads, key_dim) if per_channel else (num_tokens, value_heads)
    return [
        functional.normalize(q, dim=-1).to(dtype),
        functional.normalize(k, dim=-1).to(dtype),
        torch.randn(num_tokens, value_heads, value_dim).to(dtype),
        -functional.softplus(torch.randn(decay_shape)),
        torch.rand(num_tokens, value_heads),
    ]


def attend(
    op: Callable[..., Tensor],
    inputs: list[Any],
    states: Tensor,
    runs: StateRuns,
    scale: float = 1.0,
    rule: str = "delta",
) -> Tensor:
    return op(*inputs, states, runs, scale, delta=rule == "delta")


def attention_states(inputs: list[Any]) -> Tensor:
    """Return states that are wrong for each new sequence."""
    q, _, v, *_ = inputs
    return torch.randn(NUM_SLOTS, v.shape[1], q.shape[2], v.shape[2])


def reference_of(op: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        with monkeypatch.context() as patch:
            for name in ("supports_conv", "supports_attention", "supports_scan", "supports_lru"):
                patch.setattr(native, name, lambda *_: False)
            return op(*args, **kwargs)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["delta", "rates", "sum"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
@pytest.mark.parametrize("dims", [(32, 48), (7, 16), (128, 128), (64, 272)])
def test_linear_attention_equals_reference(
    dtype: torch.dtype,
    rule: str,
    per_channel: bool,
    dims: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = attention_inputs(23, dtype, dims=dims, per_channel=per_channel)
    if rule == "sum":
        inputs[-1] = None
    runs = make_runs(1, 20, 2, new=(False, True, False))
    states = attention_states(inputs)
    expected_states = states.clone()
    out = attend(linear_attention, inputs, states, runs, 0.25, rule)
    expected = attend(reference_of(linear_attention, monkeypatch), inputs, expected_states, runs, 0.25, rule)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_bfloat16_states_are_rounded_once_per_run(rule: str, either: str) -> None:
    inputs = attention_inputs(23, torch.float32)
    if rule == "sum":
        inputs[-1] = None
    runs = make_runs(1, 20, 2, new=(False, True, False))
    states = attention_states(inputs).bfloat16()
    wide = states.float()
    out, expected = (attend(linear_attention, inputs, own, runs, 0.25, rule) for own in (states, wide))
    assert torch.equal(out, expected)
    assert torch.equal(states, wide.bfloat16())


def test_scan_keeps_bfloat16_states(either: str) -> None:
    channels, num_states = 64, 16
    x, b, c = (torch.randn(16, size) for size in (channels, num_states, num_states))
    step, decay = functional.softplus(torch.randn(16, channels)), -torch.rand(num_states, channels) * 8
    states = torch.randn(NUM_SLOTS, num_states, channels).bfloat16()
    wide, runs = states.float(), make_runs(1, 12, 3, new=(False, True, False))
    out, expected = (selective_scan(x, step, decay, b, c, own, runs) for own in (states, wide))
    assert torch.equal(out, expected)
    assert torch.equal(states, wide.bfloat16())


def test_delta_rule_equals_transformers(either: str) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    inputs = attention_inputs(17, torch.float32)
    states = attention_states(inputs)
    out = attend(linear_attention, inputs, states, make_runs(17), 32**-0.5)
    expected, state = torch_recurrent_gated_delta_rule(
        *(value[None] for value in inputs), output_final_state=True
    )
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[3], state[0], atol=1e-5, rtol=1e-5)


def test_kimi_delta_attention_equals_transformers(either: str) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    inputs = attention_inputs(9, torch.float32, (4, 4), per_channel=True)
    states = attention_states(inputs)
    out = attend(linear_attention, inputs, states, make_runs(9), 32**-0.5)
    expected, state = recurrent_kimi_delta_attention(
        *(value[None] for value in inputs), None, output_final_state=True
    )
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[3], state[0], atol=1e-5, rtol=1e-5)


def test_state_space_duality_equals_transformers(either: str) -> None:
    """Mamba 2: queries are C, keys B, values the inputs times their step sizes."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    tokens, heads, head_dim, groups, state_size = 21, 4, 16, 2, 32
    x, step = torch.randn(tokens, heads, head_dim), functional.softplus(torch.randn(tokens, heads))
    a, b, c = -torch.rand(heads), *torch.randn(2, tokens, groups, state_size)
    states = torch.randn(NUM_SLOTS, heads, state_size, head_dim)
    out = linear_attention(c, b, x * step[..., None], step * a, None, states, make_runs(tokens))
    expected, state = mamba2_chunk_scan(
        x[None], step[None], a, b[None], c[None], chunk_size=8, return_final_states=True
    )
    torch.testing.assert_close(out, expected[0].view_as(out), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[3], state[0].transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_conv_equals_padded_convolution(dtype: torch.dtype, width: int, silu: bool, either: str) -> None:
    channels, lengths = 80, (1, 12, 3)
    x, weight, bias = (
        torch.randn(size).to(dtype) for size in ((16, channels), (channels, width), (channels,))
    )
    states = torch.randn(NUM_SLOTS, width - 1, channels).to(dtype)
    before, runs = states.clone(), make_runs(*lengths, new=(False, True, False))
    out = causal_conv(x, weight, bias, states, runs, silu=silu)
    for slot, start, end, is_new, _ in runs:
        window = torch.cat((before[slot] * (not is_new), x[start:end]))
        expected = functional.conv1d(
            window.T.float()[None], weight.float()[:, None], bias.float(), groups=channels
        )
        expected = functional.silu(expected) if silu else expected
        torch.testing.assert_close(
            out[start:end].float(), expected[0].T, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        assert torch.equal(states[slot], window[1 - width :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scan_equals_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    channels, num_states = 64, 16
    x, b, c = (torch.randn(16, size).to(dtype) for size in (channels, num_states, num_states))
    step, decay = functional.softplus(torch.randn(16, channels)), -torch.rand(num_states, channels) * 8
    states = torch.randn(NUM_SLOTS, num_states, channels)
    expected_states, runs = states.clone(), make_runs(1, 12, 3, new=(False, True, False))
    out = selective_scan(x, step, decay, b, c, states, runs)
    expected = reference_of(selective_scan, monkeypatch)(x, step, decay, b, c, expected_states, runs)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


def test_scan_equals_transformers(either: str) -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    channels, num_states, tokens = 32, 16, 11
    x, b, c = (torch.randn(tokens, size) for size in (channels, num_states, num_states))
    step, decay = functional.softplus(torch.randn(tokens, channels)), -torch.rand(channels, num_states)
    states = torch.randn(NUM_SLOTS, num_states, channels)
    out = selective_scan(x, step, decay.T.contiguous(), b, c, states, make_runs(tokens))
    expected, state = mamba_selective_scan(
        x.T[None], step.T[None], decay, b.T[None], c.T[None], return_last_state=True
    )
    torch.testing.assert_close(out, expected[0].T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[3], state[0].T, atol=1e-5, rtol=1e-5)


def lru_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, gates and decay of 3 heads of 32 channels, some of which hardly decay."""
    x, gates = torch.randn(num_tokens, 96).to(dtype), torch.randn(3, num_tokens, 64).to(dtype)
    return x, gates, -torch.logspace(-4, 1, 96)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_recurrence_equals_reference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, states = lru_inputs(16, dtype), torch.randn(NUM_SLOTS, 1, 96)
    expected_states, runs = states.clone(), make_runs(1, 12, 3, new=(False, True, False))
    out = rg_lru(*inputs, states, runs)
    for name in ("supports_lru", "supports_scan"):
        monkeypatch.setattr(native, name, lambda *_: False)
    expected = rg_lru(*inputs, expected_states, runs)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=tolerance, rtol=tolerance)


def test_gated_recurrence_equals_transformers(either: str) -> None:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    module = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=96, num_attention_heads=3, hidden_size=96))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x, states = torch.randn(9, 96), torch.randn(NUM_SLOTS, 1, 96)
    heads = x.view(9, 3, 32).transpose(0, 1)
    gates = torch.cat(
        (
            torch.baddbmm(module.input_gate_bias[:, None], heads, module.input_gate_weight),
            torch.baddbmm(module.recurrent_gate_bias[:, None], heads, module.recurrent_gate_weight),
        ),
        dim=2,
    ).detach()
    decay = -8 * functional.softplus(module.recurrent_param).detach()
    out = rg_lru(x, gates, decay, states, make_runs(9))
    with torch.no_grad():
        expected = module(x[None], torch.arange(9)[None])[0]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[3, 0], expected[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", [1, 7, 16])
def test_bits_of_gated_recurrence_do_not_depend_on_chunks(cut: int, either: str) -> None:
    x, gates, decay = lru_inputs(17, torch.float32)

    def run(tokens: slice, runs: StateRuns, states: Tensor) -> Tensor:
        own = (
            torch.cat((x[:2], x[tokens], x[:3])),
            torch.cat((gates[:, :2], gates[:, tokens], gates[:, :3]), 1),
        )
        return rg_lru(*own, decay, states, runs)[2:-3]

    whole = run(slice(None), make_runs(2, 17, 3), torch.zeros(NUM_SLOTS, 1, 96))
    states = torch.zeros(NUM_SLOTS, 1, 96)
    first = run(slice(cut), make_runs(2, cut, 3), states)
    runs = make_runs(2, 17 - cut, 3, slots=(1, 0, 2), new=(True, False, True))
    assert torch.equal(whole, torch.cat((first, run(slice(cut, None), runs, states))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [1, 7, 16])
def test_bits_depend_neither_on_chunks_nor_on_neighbors(dtype: torch.dtype, cut: int, either: str) -> None:
    """A sequence alone at once, against two chunks beside others."""
    length, channels = 17, 64
    inputs = attention_inputs(length, dtype)
    x, b, c = (torch.randn(length, size).to(dtype) for size in (channels, 16, 16))
    weight, step, decay = (
        torch.randn(channels, 4).to(dtype),
        torch.rand(length, channels),
        -torch.rand(16, channels),
    )

    def run(tokens: slice, runs: StateRuns, states: list[Tensor]) -> list[Tensor]:
        own = [torch.cat((value[:2], value[tokens], value[:3])) for value in inputs]
        part = [torch.cat((value[:2], value[tokens], value[:3])) for value in (x, step, b, c)]
        outs = [
            attend(linear_attention, own, states[0], runs),
            causal_conv(part[0], weight, None, states[1], runs, silu=True),
            selective_scan(part[0], part[1], decay, part[2], part[3], states[2], runs),
        ]
        return [out[2:-3] for out in outs]

    def fresh() -> list[Tensor]:
        return [
            torch.zeros(NUM_SLOTS, 4, 32, 48),
            torch.zeros(NUM_SLOTS, 3, channels, dtype=dtype),
            torch.zeros(NUM_SLOTS, 16, channels),
        ]

    whole = run(slice(None), make_runs(2, length, 3), fresh())
    states = fresh()
    first = run(slice(cut), make_runs(2, cut, 3), states)
    runs = make_runs(2, length - cut, 3, slots=(1, 0, 2), new=(True, False, True))
    second = run(slice(cut, None), runs, states)
    for at_once, *parts in zip(whole, first, second, strict=True):
        assert torch.equal(at_once, torch.cat(parts))


def test_state_after_drafts_is_that_of_accepted_tokens(either: str) -> None:
    ops = linear_attention, causal_conv, selective_scan
    check_repeated_runs(ops, lambda tensor: tensor, exact=True)


def make_recurrences(
    ops: tuple[Callable[..., Tensor], ...], move: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], Callable[[list[Tensor], StateRuns], list[Tensor]]]:
    """Return states of each op, and what computes 10 tokens with states and runs."""
    attend_, convolve, scan = ops
    attention = [move(each) for each in attention_inputs(10, torch.float32, dims=(24, 48))]
    x, b, c = (move(torch.randn(10, size)) for size in (64, 16, 16))
    weight, step, decay = move(torch.randn(64, 4)), move(torch.rand(10, 64)), move(-torch.rand(16, 64))
    shapes = (NUM_SLOTS, 4, 24, 48), (NUM_SLOTS, 3, 64), (NUM_SLOTS, 16, 64)

    def compute(states: list[Tensor], runs: StateRuns) -> list[Tensor]:
        return [
            runs.compute(attend_, *attention, states=states[0], scale=0.5),
            runs.compute(convolve, x, weight, None, states=states[1], silu=True),
            runs.compute(scan, x, step, decay, b, c, states=states[2]),
        ]

    return [move(torch.randn(shape)) for shape in shapes], compute


def check_repeated_runs(
    ops: tuple[Callable[..., Tensor], ...], move: Callable[[Tensor], Tensor], *, exact: bool
) -> None:
    """Runs of 4, 1 and 5 tokens, of which the first and the last have drafts, and 1 and 3 tokens are accepted."""
    before, compute = make_recurrences(ops, move)
    whole = make_runs(4, 1, 5, new=(False, False, False))
    runs = replace(on(move, whole), stores=move(torch.tensor([False, True, False])), calls=[])
    states, expected = [each.clone() for each in before], [each.clone() for each in before]
    outs, expected_outs = compute(states, runs), compute([each.clone() for each in before], on(move, whole))
    tolerance = 0.0 if exact else 1e-5
    for each, other in zip(outs, expected_outs, strict=True):
        torch.testing.assert_close(each, other, atol=tolerance, rtol=tolerance)
    for kept, old in zip(states, before, strict=True):  # only that of the run without drafts is stored
        assert [bool((kept[slot] == old[slot]).all()) for slot in (3, 0, 4)] == [True, False, True]
    runs.repeat(move(torch.tensor([0, 2])), move(torch.tensor([1, 3], dtype=torch.int32)))
    ends = move(torch.tensor([1, 5, 8], dtype=torch.int32))
    compute(expected, replace(on(move, whole), shorter=ends))
    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(state, other, atol=tolerance, rtol=tolerance)


def test_cut_runs_save_the_state_at_the_cut(either: str) -> None:
    check_cut_runs((linear_attention, causal_conv, selective_scan), lambda tensor: tensor, exact=True)


def check_cut_runs(
    ops: tuple[Callable[..., Tensor], ...], move: Callable[[Tensor], Tensor], *, exact: bool
) -> None:
    """Runs of 4, 1 and 5 tokens in slots 3, 0 and 4, of which the first is cut after 3 and the last after 1."""
    before, compute = make_recurrences(ops, move)
    tolerance = 0.0 if exact else 1e-5
    whole = on(move, make_runs(4, 1, 5, new=(True, False, False)))
    cut = whole.cut(
        move(torch.tensor([0, 2])),
        move(torch.tensor([3, 1], dtype=torch.int32)),
        move(torch.tensor([2, 1])),
        move(torch.tensor([3, 6, 7, 8, 9])),
        4,
    )
    states, expected = [each.clone() for each in before], [each.clone() for each in before]
    shorter = replace(whole, shorter=move(torch.tensor([3, 5, 6], dtype=torch.int32)))
    saved = [each.clone() for each in before]
    compute(saved, shorter)
    for out, other in zip(compute(states, cut), compute(expected, whole), strict=True):
        torch.testing.assert_close(out, other, atol=tolerance, rtol=tolerance)
    for state, other, at_cut in zip(states, expected, saved, strict=True):
        torch.testing.assert_close(state[[3, 0, 4]], other[[3, 0, 4]], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(state[[2, 1]], at_cut[[3, 4]], atol=tolerance, rtol=tolerance)


def test_kernels_save_states_at_cuts(device: str) -> None:
    from quire.kernels.gpu import recurrence as gpu

    ops = gpu.linear_attention, gpu.causal_conv, gpu.selective_scan
    check_cut_runs(ops, lambda tensor: tensor.to(device), exact=False)


def test_kernels_repeat_accepted_tokens(device: str) -> None:
    from quire.kernels.gpu import recurrence as gpu

    ops = gpu.linear_attention, gpu.causal_conv, gpu.selective_scan
    check_repeated_runs(ops, lambda tensor: tensor.to(device), exact=False)


def on(place: str | Callable[[Tensor], Tensor], runs: StateRuns) -> StateRuns:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(place) if isinstance(place, str) else place(tensor)

    return StateRuns(move(runs.slots), move(runs.starts), move(runs.is_new), runs.max_len)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rule", ["delta", "rates", "sum"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["per head", "per channel"])
def test_linear_attention_kernel(
    device: str, dtype: torch.dtype, rule: str, per_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.gpu import recurrence as gpu

    inputs = attention_inputs(9, dtype, dims=(24, 40), per_channel=per_channel)
    if rule == "sum":
        inputs[-1] = None
    runs, states = make_runs(1, 6, 2, new=(False, True, False)), attention_states(inputs)
    expected_states = states.clone()
    expected = attend(reference_of(linear_attention, monkeypatch), inputs, expected_states, runs, 0.25, rule)
    states = states.to(device)
    moved = [None if value is None else value.to(device) for value in inputs]
    out = attend(gpu.linear_attention, moved, states, on(device, runs), 0.25, rule)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states.cpu(), expected_states, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("rule", "dtype"), diagonal(["delta", "rates", "sum"], [*DTYPES, torch.float16]))
def test_linear_attention_kernel_of_chunks(
    device: str, dtype: torch.dtype, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.gpu import recurrence as gpu

    inputs = attention_inputs(1 + 150 + 20, dtype, (1, 2), dims=(24, 40))
    if rule == "sum":
        inputs[-1] = None
    runs, states = make_runs(1, 150, 20, new=(False, True, False)), attention_states(inputs)
    expected_states = states.clone()
    expected = attend(reference_of(linear_attention, monkeypatch), inputs, expected_states, runs, 0.25, rule)
    states = states.to(device)
    moved = [None if value is None else value.to(device) for value in inputs]
    out = attend(gpu.linear_attention, moved, states, on(device, runs), 0.25, rule)
    tolerance = 5e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states.cpu(), expected_states, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("silu", [True, False])
def test_conv_kernel(device: str, dtype: torch.dtype, silu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.gpu import recurrence as gpu

    x, weight, bias = (torch.randn(size).to(dtype) for size in ((24, 40), (40, 4), (40,)))
    states = torch.randn(NUM_SLOTS, 3, 40).to(dtype)
    expected_states = states.clone()
    runs = make_runs(1, 20, 2, 1, new=(False, True, False, True))
    expected = reference_of(causal_conv, monkeypatch)(x, weight, bias, expected_states, runs, silu=silu)
    states = states.to(device)
    out = gpu.causal_conv(
        x.to(device), weight.to(device), bias.to(device), states, on(device, runs), silu=silu
    )
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(states.cpu(), expected_states)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_scan_kernel(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.gpu import recurrence as gpu

    x, b, c = (torch.randn(9, size).to(dtype) for size in (40, 12, 12))
    step, decay = functional.softplus(torch.randn(9, 40)), -torch.rand(12, 40) * 8
    states = torch.randn(NUM_SLOTS, 12, 40)
    expected_states, runs = states.clone(), make_runs(1, 6, 2, new=(False, True, False))
    expected = reference_of(selective_scan, monkeypatch)(x, step, decay, b, c, expected_states, runs)
    states = states.to(device)
    x, step, decay, b, c = (value.to(device) for value in (x, step, decay, b, c))
    out = gpu.selective_scan(x, step, decay, b, c, states, on(device, runs))
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.cpu(), expected_states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_keep_bfloat16_states(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.gpu import recurrence as gpu

    inputs = attention_inputs(1 + 20 + 2, dtype, (1, 2), dims=(24, 40))
    runs, states = make_runs(1, 20, 2, new=(False, True, False)), attention_states(inputs).bfloat16()
    expected_states = states.clone()
    expected = attend(reference_of(linear_attention, monkeypatch), inputs, expected_states, runs, 0.25)
    states, moved = states.to(device), [value.to(device) for value in inputs]
    out = attend(gpu.linear_attention, moved, states, on(device, runs), 0.25)
    torch.testing.assert_close(out.cpu(), expected, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(states.cpu(), expected_states, atol=5e-2, rtol=5e-2)
    x, b, c = (torch.randn(9, size).to(dtype) for size in (40, 12, 12))
    step, decay = functional.softplus(torch.randn(9, 40)), -torch.rand(12, 40) * 8
    states, runs = torch.randn(NUM_SLOTS, 12, 40).bfloat16(), make_runs(1, 6, 2, new=(False, True, False))
    expected_states = states.clone()
    expected = reference_of(selective_scan, monkeypatch)(x, step, decay, b, c, expected_states, runs)
    states = states.to(device)
    x, step, decay, b, c = (value.to(device) for value in (x, step, decay, b, c))
    out = gpu.selective_scan(x, step, decay, b, c, states, on(device, runs))
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.cpu(), expected_states, atol=1e-2, rtol=1e-2)
