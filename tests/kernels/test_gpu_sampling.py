"""Sampling kernels against their PyTorch references, which sort, and sums against float64."""

from __future__ import annotations

import pytest
import torch
from logits_processors import to_device
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.gumbel import gumbel_noise, random_keys
from quire.kernels.logits import Biases, LogitsProcessors, Masks, Penalties

OFF = {"top_k": 1 << 20, "top_p": 2.0, "min_p": 0.0}

TRUNCATIONS: dict[str, dict[str, float]] = {
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
    """Return random logits; if tied, many are equal, including zeros of both signs."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(num_rows, vocab_len)
    return (logits.round() if tied else logits).to(device)


def keys_of(num_rows: int, device: str) -> Tensor:
    return random_keys(torch.arange(num_rows) - 2, 7 * torch.arange(num_rows)).to(device)


def test_noise_matches_twin(device: str) -> None:
    """With one token per row and logit 0, the score is the noise."""
    from quire.kernels.gpu.sample_full import sample_full

    num_rows = 60
    zeros, ones = torch.zeros(num_rows, 1, device=device), torch.ones(num_rows, device=device)
    for token_id in (0, 151_935):
        keys = keys_of(num_rows, device)
        scores, token_ids = sample_full(zeros, ones, keys, token_id)
        ids = torch.tensor([[token_id]], dtype=torch.int32, device=device)
        torch.testing.assert_close(scores, gumbel_noise(keys, ids).squeeze(1), atol=1e-5, rtol=1e-5)
        assert (token_ids == token_id).all()


@pytest.mark.parametrize("vocab_len", [1, 1000, 9001])
def test_sample_full_matches_twin(device: str, vocab_len: int) -> None:
    from quire.kernels.gpu.sample_full import sample_full

    logits = random_logits(6, vocab_len, tied=False, device=device)
    logits[:, vocab_len // 2 + 1 :] = -torch.inf
    temperature, keys = torch.linspace(0.3, 1.5, 6, device=device), keys_of(6, device)
    scores, token_ids = sample_full(logits, temperature, keys, 100)
    expected_scores, expected_ids = sampling.sample_full(logits.cpu(), temperature.cpu(), keys.cpu(), 100)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(scores.cpu(), expected_scores, atol=1e-5, rtol=1e-5)


def test_greedy_and_random_rows_in_one_batch(device: str) -> None:
    """Selected rows in another order; rows of NaN or infinities sample some token."""
    from quire.kernels.gpu.sample_full import sample_full, sample_greedy

    logits = random_logits(6, 5000, tied=True, device=device)
    rows = torch.tensor([4, 1, 2], device=device)
    temperature, keys = torch.tensor([0.0, 0.7, 0.0], device=device), keys_of(3, device)
    found = sample_full(logits, temperature, keys, 100, rows)
    expected = sampling.sample_full(logits.cpu(), temperature.cpu(), keys.cpu(), 100, rows.cpu())
    assert found[1].tolist() == expected[1].tolist()
    torch.testing.assert_close(found[0].cpu(), expected[0], atol=1e-5, rtol=1e-5)
    assert sample_greedy(logits, 0, rows)[1].tolist() == logits[rows].argmax(dim=1).tolist()
    broken = (
        torch.tensor([[torch.nan], [torch.inf], [-torch.inf]], device=device).expand(-1, 5000).contiguous()
    )
    assert ((sample_greedy(broken)[1] >= 0) & (sample_greedy(broken)[1] < 5000)).all()


def test_random_keys_match_twin(device: str) -> None:
    from quire.kernels.gpu import gumbel

    seeds = torch.tensor([0, 1, -1, (1 << 63) - 1, -(1 << 63), 123456789])
    positions = torch.tensor([0, 131071, 5, 7, 1, 1 << 40])
    found = gumbel.random_keys(seeds.to(device), positions.to(device))
    assert torch.equal(found.cpu(), random_keys(seeds, positions))


@pytest.fixture(params=["one tile", "tiles"])
def tiled(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.gpu import sample_top_k_top_p, topk_candidates, topk_tokens

    if request.param == "tiles":
        for module, name, length in (
            (topk_candidates, "GROUP_LEN", 4),
            (topk_candidates, "NUM_GROUPS", 16),
            (topk_candidates, "BLOCK_VOCAB", 32),
            (sample_top_k_top_p, "BLOCK_VOCAB", 64),
            (topk_tokens, "BLOCK_VOCAB", 64),
        ):
            monkeypatch.setattr(module, name, length)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("tiled", "room"), [("one tile", 1024), ("tiles", 1024), ("tiles", 16)], indirect=["tiled"]
)
def test_sample_top_k_top_p_matches_twin(
    device: str, tied: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row per truncation; with few candidates stored, most rows search all tokens."""
    from quire.kernels.gpu import topk_candidates

    monkeypatch.setattr(topk_candidates, "MAX_CANDIDATES", room)
    logits = random_logits(len(TRUNCATIONS), 300, tied=tied, device=device)
    expect_tokens_of_twin(logits, list(TRUNCATIONS.values()), device)


def test_sample_top_k_top_p_with_logits_processors(device: str) -> None:
    """Selected rows in another order than logits and processors."""
    torch.manual_seed(0)
    logits = random_logits(4, 200, tied=False, device=device)
    words, counts = torch.randint(-(2**31), 2**31, (2, 7)).int(), torch.randint(0, 3, (2, 200)).short()
    biases = Biases(
        torch.tensor([0, 0, 2, 2, 3]).int(), torch.tensor([3, 199, 0]).int(), torch.tensor([5.0, -9.0, 2.0])
    )
    penalties = Penalties(torch.tensor([1, -1, 0, 0]), counts, words, torch.rand(4, 3) + 0.5)
    logits_processors = LogitsProcessors(200, biases, penalties, Masks(torch.tensor([-1, 1, 0, -1]), words))
    rows = torch.tensor([3, 1])
    expect_tokens_of_twin(
        logits, [TRUNCATIONS["all"], TRUNCATIONS["top_p 0.95"]], device, rows, logits_processors
    )


def test_top_k_larger_than_number_of_allowed_tokens(device: str) -> None:
    logits = random_logits(3, 100, tied=True, device=device)
    logits[:2, 3:] = -torch.inf
    logits[2] = -torch.inf
    truncations: list[dict[str, float]] = [
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.1},
    ]
    expect_tokens_of_twin(logits, truncations, device)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_non_finite_rows_sample_some_token(device: str, poison: float) -> None:
    from quire.kernels.gpu.sample_top_k_top_p import sample_top_k_top_p

    logits = torch.full((len(TRUNCATIONS), 300), poison, device=device)
    token_ids = sample_top_k_top_p(logits, *sampling_arguments(list(TRUNCATIONS.values()), device))
    assert ((token_ids >= 0) & (token_ids < 300)).all()


def test_candidates_are_few_and_sufficient(device: str) -> None:
    """Of 20,000 tokens, the candidates are all tokens from the bound up, and few more than needed."""
    from quire.kernels.gpu.logits import make_source
    from quire.kernels.gpu.topk_candidates import Truncation, find_candidates

    torch.manual_seed(0)
    logits = 3 * torch.randn(3, 20_000, device=device)
    top_k, top_p = torch.tensor([50, 1 << 20, 1 << 20]), torch.tensor([2.0, 0.5, 2.0], dtype=torch.float64)
    truncation = Truncation(*(cut.to(device) for cut in (top_k, top_p, torch.tensor([0.0, 0.0, 0.05]).log())))
    source, num_rows = make_source(logits, None, None, None)
    found = find_candidates(source, num_rows, truncation, 0)
    values = logits.double().cpu()
    ordered, order = values.sort(dim=1, descending=True)
    likelier = ordered.softmax(dim=1).cumsum(1)
    shares = (ordered - ordered[:, :1]).exp()
    needed = [50, int((likelier[1] < 0.5).sum()) + 1, int((shares[2] >= 0.05).sum())]
    for row in range(3):
        count = int(found.counts[row])
        assert needed[row] <= count <= 2 * needed[row] + 10
        columns = 0xFFFFFFFF - (found.keys[row, :count].cpu() & 0xFFFFFFFF)
        assert sorted(columns.tolist()) == sorted(order[row, :count].tolist())
    torch.testing.assert_close(found.log_totals.double().cpu(), values.logsumexp(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.totals.double().cpu(), shares.sum(1) * 2**36, atol=0, rtol=1e-5)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("num_top", [0, 40, 128, 200])
@pytest.mark.parametrize("tied", [False, True, "all"])
def test_topk_tokens_match_sort(
    device: str, num_top: int, tied: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties come by id, even if there are more of them than stored candidates."""
    from quire.kernels.gpu import topk_candidates
    from quire.kernels.gpu.topk_tokens import topk_tokens

    monkeypatch.setattr(topk_candidates, "MAX_CANDIDATES", 128)
    logits = random_logits(3, 300, tied=bool(tied), device=device)
    if tied == "all":
        logits[:2] = 1.5
    temperature = torch.tensor([0.7, 1.3], device=device)
    rows = torch.tensor([2, 0], device=device)
    values, columns, log_totals = topk_tokens(logits, num_top, temperature, rows)
    scaled = logits[rows].cpu() / temperature.cpu().unsqueeze(1)
    expected, order = scaled.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values.cpu(), expected[:, :num_top])
    assert num_top > 128 or torch.equal(columns.cpu(), order[:, :num_top].int())
    exact = scaled.double().logsumexp(1)
    torch.testing.assert_close(log_totals.double().cpu(), exact, atol=1e-5, rtol=1e-5)


def test_empty_batch_returns_no_tokens(device: str) -> None:
    from quire.kernels.gpu.sample_full import sample_greedy
    from quire.kernels.gpu.sample_top_k_top_p import sample_top_k_top_p
    from quire.kernels.gpu.topk_tokens import topk_tokens

    logits = torch.zeros(0, 50, device=device)
    assert sample_greedy(logits)[1].shape == (0,)
    assert sample_top_k_top_p(logits, *sampling_arguments([], device)).shape == (0,)
    assert topk_tokens(logits, 3)[0].shape == (0, 3)


def sampling_arguments(
    truncations: list[dict[str, float]], device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of sample_top_k_top_p after the logits."""
    settings = {name: torch.tensor([(OFF | row)[name] for row in truncations]) for name in OFF}
    return (
        torch.linspace(0.6, 1.4, len(truncations)).to(device),
        settings["top_k"].long().to(device),
        settings["top_p"].double().to(device),
        settings["min_p"].float().to(device),
        keys_of(len(truncations), device),
    )


def expect_tokens_of_twin(
    logits: Tensor,
    truncations: list[dict[str, float]],
    device: str,
    rows: Tensor | None = None,
    logits_processors: LogitsProcessors | None = None,
) -> None:
    from quire.kernels.gpu.sample_top_k_top_p import sample_top_k_top_p

    expected = sampling.sample_top_k_top_p(
        logits.cpu(), *sampling_arguments(truncations, "cpu"), rows, logits_processors
    )
    if rows is not None and logits_processors is not None:
        rows, logits_processors = rows.to(device), to_device(logits_processors, device)
    token_ids = sample_top_k_top_p(logits, *sampling_arguments(truncations, device), rows, logits_processors)
    assert token_ids.tolist() == expected.tolist()
