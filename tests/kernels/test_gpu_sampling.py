"""The kernels that draw tokens against their PyTorch twins, which sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.gumbel import gumbel_noise, random_keys

OFF = {"top_k": 1 << 20, "top_p": 2.0, "min_p": 0.0}

CUTS = {
    "none": {},
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5},
    "top_k 299": {"top_k": 299},
    "top_p 0.5": {"top_p": 0.5},
    "top_p 0.95": {"top_p": 0.95},
    "tiny top_p": {"top_p": 1e-6},
    "min_p 0.1": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
}


def random_logits(num_rows: int, vocab_len: int, *, tied: bool, device: str) -> Tensor:
    """Logits of which many, if tied, are the same, zeros of both signs among them."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(num_rows, vocab_len)
    return (logits.round() if tied else logits).to(device)


def keys_of(num_rows: int, device: str) -> Tensor:
    return random_keys(torch.arange(num_rows) - 2, 7 * torch.arange(num_rows)).to(device)


def test_noise_is_that_of_the_twin(device: str) -> None:
    """One token a row: its score is its noise."""
    from quire.kernels.gpu.draw_from_all import draw_from_all

    num_rows = 60
    zeros, ones = torch.zeros(num_rows, 1, device=device), torch.ones(num_rows, device=device)
    for token_id in (0, 151_935):
        keys = keys_of(num_rows, device)
        scores, token_ids = draw_from_all(zeros, ones, keys, token_id)
        ids = torch.tensor([[token_id]], dtype=torch.int32, device=device)
        torch.testing.assert_close(scores, gumbel_noise(keys, ids).squeeze(1), atol=1e-5, rtol=1e-5)
        assert (token_ids == token_id).all()


@pytest.mark.parametrize("vocab_len", [1, 1000, 9001])
def test_draw_from_all(device: str, vocab_len: int) -> None:
    from quire.kernels.gpu.draw_from_all import draw_from_all

    logits = random_logits(6, vocab_len, tied=False, device=device)
    logits[:, vocab_len // 2 + 1 :] = -torch.inf
    temperature, keys = torch.linspace(0.3, 1.5, 6, device=device), keys_of(6, device)
    scores, token_ids = draw_from_all(logits, temperature, keys, 100)
    expected_scores, expected_ids = sampling.draw_from_all(logits.cpu(), temperature.cpu(), keys.cpu(), 100)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(scores.cpu(), expected_scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_draw_from_kept(device: str, cuts: dict[str, float], tied: bool) -> None:
    logits = random_logits(4, 300, tied=tied, device=device)
    expect_draws_of_the_twin(logits, [cuts] * 4, device)


def test_draw_from_kept_in_several_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.gpu import draw_from_kept

    monkeypatch.setattr(draw_from_kept, "BLOCK_VOCAB", 64)
    logits = random_logits(3, 300, tied=True, device=device)
    expect_draws_of_the_twin(logits, [CUTS["top_k 299"], CUTS["top_p 0.95"], CUTS["all"]], device)


def test_fewer_tokens_are_allowed_than_top_k(device: str) -> None:
    logits = random_logits(2, 100, tied=True, device=device)
    logits[:, 3:] = -torch.inf
    expect_draws_of_the_twin(logits, [{"top_k": 50}, {"top_k": 50, "top_p": 0.9}], device)


def expect_draws_of_the_twin(logits: Tensor, cuts: list[dict[str, float]], device: str) -> None:
    from quire.kernels.gpu.draw_from_kept import draw_from_kept

    settings = {name: torch.tensor([(OFF | row)[name] for row in cuts]) for name in OFF}
    temperature = torch.linspace(0.6, 1.4, len(cuts))
    arguments = (
        logits,
        temperature,
        settings["top_k"].long(),
        settings["top_p"].double(),
        settings["min_p"].float(),
        keys_of(len(cuts), device),
    )
    token_ids = draw_from_kept(*(argument.to(device) for argument in arguments))
    expected = sampling.draw_from_kept(*(argument.cpu() for argument in arguments))
    assert token_ids.tolist() == expected.tolist()
