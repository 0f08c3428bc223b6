"""Attention to shared vectors, and the windows and entries of compressors, beside plain loops."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.shared_attention import (
    choose_entries,
    entry_places,
    gather_entries,
    gather_tokens,
    rotate_last,
    shared_attention,
    token_windows,
)
from quire.kernels.state_runs import StateRuns

WIDTH, CHANNELS = 4, 3


@pytest.mark.parametrize("stores", [None, [True, False, True]])
def test_windows_reach_back_to_the_inputs_of_earlier_steps(stores: list[bool] | None) -> None:
    """Of three sequences the second begins in this step; a run whose tokens are drafts leaves its state."""
    torch.manual_seed(1)
    slots, lens, is_new = [4, 1, 2], [1, 5, 3], [False, True, False]
    starts = torch.tensor([0, 1, 6, 9], dtype=torch.int32)
    states, x = torch.randn(6, WIDTH - 1, CHANNELS), torch.randn(9, CHANNELS)
    kept = states.clone()
    flags = None if stores is None else torch.tensor(stores)
    runs = StateRuns(torch.tensor(slots, dtype=torch.int32), starts, torch.tensor(is_new), max(lens), flags)
    ends = torch.tensor([0, 1, 5, 7])
    found = token_windows(x, ends, states, runs)
    histories = [
        torch.cat((torch.zeros(WIDTH - 1, CHANNELS) if new else kept[slot], x[start : start + length]))
        for slot, length, new, start in zip(slots, lens, is_new, starts.tolist(), strict=False)
    ]
    for window, (run, token) in zip(found, [(0, 0), (1, 0), (1, 4), (2, 1)], strict=True):
        assert torch.equal(window, histories[run][token : token + WIDTH])
    for run, slot in enumerate(slots):
        expected = histories[run][1 - WIDTH :] if stores is None or stores[run] else kept[slot]
        assert torch.equal(states[slot], expected)
    others = [0, 3, 5]
    assert torch.equal(states[others], kept[others])


def test_windows_of_cut_runs_save_the_inputs_before_the_cut() -> None:
    """Of runs of 4 and 5 tokens the second is cut after 2; the windows are those of the whole runs."""
    torch.manual_seed(1)
    starts, is_new = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([True, False])
    runs = StateRuns(torch.tensor([3, 1], dtype=torch.int32), starts, is_new, 5)
    cut = runs.cut(
        torch.tensor([1]), torch.tensor([2], dtype=torch.int32), torch.tensor([4]), torch.tensor([6, 7, 8]), 3
    )
    before, x, ends = torch.randn(6, WIDTH - 1, CHANNELS), torch.randn(9, CHANNELS), torch.tensor([0, 5, 8])
    states, expected = before.clone(), before.clone()
    found = cut.compute(token_windows, x, ends, states=states, by_token=False)
    assert torch.equal(found, token_windows(x, ends, expected, runs))
    saved = states[4].clone()
    states[4] = before[4]
    assert torch.equal(states, expected)
    assert torch.equal(saved, torch.cat((before[1], x[4:6]))[1 - WIDTH :])


@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_to_shared_vectors_equals_a_loop(has_sinks: bool) -> None:
    torch.manual_seed(2)
    q, keys = torch.randn(2, 3, 5, 8), torch.randn(2, 7, 8)
    visible = torch.rand(2, 3, 7) < 0.6
    visible[1, 2] = False  # attends to nothing
    visible[:, :, 4], keys[:, 4] = False, torch.nan  # what nobody attends to has no effect
    sinks = torch.randn(5) if has_sinks else None
    found = shared_attention(q, keys, visible, sinks, 0.3, 6)
    for group in range(2):
        for token in range(3):
            own = keys[group][visible[group, token]].double()
            for head in range(5):
                logits = own @ q[group, token, head].double() * 0.3
                more = [] if sinks is None else [sinks[head : head + 1].double()]
                weights = torch.cat([logits, *more]).softmax(0)[: len(own)]
                expected = weights @ own[:, :6]
                assert torch.allclose(found[group, token, head].double(), expected, atol=1e-6)


@pytest.mark.parametrize(("rate", "block_size"), [(2, 4), (3, 4), (4, 4), (5, 4), (16, 4), (4, 16), (7, 16)])
def test_entry_is_in_the_block_of_its_last_token(rate: int, block_size: int) -> None:
    num_entries, count = 23, -(-block_size // rate)
    table = torch.randperm(1 + (num_entries * rate - 1) // block_size)[None] + 1
    entries = torch.full((table.shape[1] + 1, count, 1), torch.nan)
    index = torch.arange(num_entries)
    block, place = entry_places(index, rate, block_size)
    assert block.tolist() == [(entry * rate + rate - 1) // block_size for entry in range(num_entries)]
    assert len(set(zip(block.tolist(), place.tolist(), strict=True))) == num_entries
    assert 0 <= int(place.min()) <= int(place.max()) < count
    entries[table[0, block], place, 0] = index.float()
    assert gather_entries(entries, table, num_entries, rate, block_size)[0, :, 0].tolist() == index.tolist()


def test_tokens_are_gathered_by_position() -> None:
    latents = torch.arange(5 * 4).float().view(5, 1, 1, 4, 1)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    found = gather_tokens(latents, table, torch.tensor([[0, 3, 4, 6]]))
    assert found[0, :, 0].tolist() == [12.0, 15.0, 4.0, 6.0]


def test_best_entries_are_chosen_among_those_of_the_past() -> None:
    torch.manual_seed(3)
    q, weights, keys = torch.randn(1, 4, 6, 5), torch.randn(1, 4, 6), torch.randn(1, 9, 5)
    counts = torch.tensor([[0, 2, 3, 9]])
    found = choose_entries(q, weights, keys, counts, 3)
    scores = torch.einsum("gth,gthl->gtl", weights, torch.einsum("gthd,gld->gthl", q, keys).relu())
    assert [row.nonzero()[:, 0].tolist() for row in found[0, :3]] == [[], [0, 1], [0, 1, 2]]
    assert sorted(scores[0, 3].topk(3).indices.tolist()) == found[0, 3].nonzero()[:, 0].tolist()


def test_rotation_back_restores_the_last_elements() -> None:
    x, angles = torch.randn(3, 2, 7), torch.randn(3, 2)
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    sin[:, :2] *= -1
    turned = rotate_last(x, cos, sin)
    assert torch.equal(turned[..., :3], x[..., :3])
    first, second = x[..., 3], x[..., 4]
    assert torch.allclose(turned[..., 3], first * cos[:, None, 0] - second * angles.sin()[:, None, 0])
    assert torch.allclose(rotate_last(turned, cos, sin, back=True), x, atol=1e-6)
