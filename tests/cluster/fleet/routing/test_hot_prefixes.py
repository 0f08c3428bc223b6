"""HotPrefixes: which beginnings of prompts are worth having at another replica."""

from __future__ import annotations

import numpy as np

from quire.cluster.fleet.routing import hot_prefixes
from quire.cluster.fleet.routing.hot_prefixes import RECENT_S, HotPrefixes
from quire.cluster.text.requests.request import Request
from quire.proto.digests import make_root, prefix_hashes
from quire.proto.sampling import SamplingParams

SIZE = 4


def note(prefixes: HotPrefixes, tokens: list[int], num_cached_blocks: int, now: float = 0.0) -> None:
    request = Request("r", np.array(tokens, np.int32), SamplingParams(max_tokens=9), tenant="t")
    hashes = prefix_hashes(request.prompt_token_ids, SIZE, make_root("m", tenant="t"))
    prefixes.note(request, hashes, num_cached_blocks, now)


def test_what_several_prompts_begin_with_is_hot_in_the_order_of_its_savings() -> None:
    prefixes = HotPrefixes(SIZE)
    system, document = list(range(8)), list(range(100, 140))
    for number in range(3):
        note(prefixes, [*system, 50 + number, 60], 2)
    for number in range(2):
        note(prefixes, [*document, 50 + number], 10)
    note(prefixes, [*system, *range(200, 220)], 6)  # a turn of one conversation
    note(prefixes, list(range(300, 320)), 0)
    hottest = prefixes.hottest(0.0)
    assert [(each.num_hits, len(each.hashes)) for each in hottest] == [(2, 10), (3, 2)]
    assert hottest[1].request.prompt_token_ids.tolist() == [*system, 50]
    assert (hottest[1].request.tenant, hottest[1].request.sampling.max_tokens) == ("t", 1)
    assert hottest[0].first(2, SIZE).prompt_token_ids.tolist() == document[:9]
    assert prefixes.hottest(RECENT_S + 1.0) == []


def test_whole_prompt_leaves_a_token_to_compute() -> None:
    prefixes = HotPrefixes(SIZE)
    for _ in range(2):
        note(prefixes, list(range(8)), 2)
    (prefix,) = prefixes.hottest(0.0)
    assert len(prefix.hashes) == 1


def test_memory_is_bounded() -> None:
    prefixes = HotPrefixes(SIZE)
    for number in range(2 * hot_prefixes.MAX_PREFIXES):
        for _ in range(2):
            note(prefixes, [number] * 9, 2)
    assert len(prefixes.hottest(0.0)) == hot_prefixes.MAX_PREFIXES
    for number in range(3):
        for _ in range(2):
            note(
                prefixes, [number] * (hot_prefixes.MAX_TOKENS // 2 - 8), hot_prefixes.MAX_TOKENS // 2 // SIZE
            )
    assert (
        sum(len(each.request.prompt_token_ids) for each in prefixes.hottest(0.0)) <= hot_prefixes.MAX_TOKENS
    )
