"""Subset: each replica is used by equally many gateways, and little changes when some come or go."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.cluster.fleet.routing.subset import MIN_GATEWAYS, Subset

SIZE = 16
REPLICAS = [f"replica-{number:08x}" for number in range(120)]
GATEWAYS = [f"{number:016x}" for number in range(30)]


def subsets_of(gateways: list[str]) -> dict[str, Subset]:
    return {gateway: Subset(gateway, SIZE) for gateway in gateways}


def choices(
    subsets: dict[str, Subset], replicas: list[str] = REPLICAS, num_expected: int = 0
) -> dict[str, set[str]]:
    return {
        gateway: subset.choose(list(subsets), replicas, num_expected=num_expected)
        for gateway, subset in subsets.items()
    }


def num_changes(before: dict[str, set[str]], after: dict[str, set[str]]) -> int:
    return sum(len(before[gateway] ^ after[gateway]) for gateway in before.keys() & after.keys())


@pytest.mark.parametrize("num_gateways", [1, 2, 3, 7, 30])
def test_each_replica_is_used_by_equally_many_gateways(num_gateways: int) -> None:
    chosen = choices(subsets_of(GATEWAYS[:num_gateways]))
    users = Counter(replica for subset in chosen.values() for replica in subset)
    expected = max(min(MIN_GATEWAYS, num_gateways), -(-SIZE * num_gateways // len(REPLICAS)))
    assert users == dict.fromkeys(REPLICAS, expected)
    assert min(map(len, chosen.values())) >= SIZE // 2


def test_connections_do_not_grow_with_gateways_times_replicas() -> None:
    def connections(num_gateways: int, num_replicas: int) -> int:
        chosen = choices(subsets_of(GATEWAYS[:num_gateways]), REPLICAS[:num_replicas])
        return sum(map(len, chosen.values()))

    for num_gateways, num_replicas in ((5, 60), (10, 60), (10, 120), (30, 120)):
        assert connections(num_gateways, num_replicas) <= SIZE * num_gateways + MIN_GATEWAYS * num_replicas


def test_small_fleet_is_used_whole() -> None:
    assert Subset("gateway", SIZE).choose(GATEWAYS, REPLICAS[:SIZE]) == set(REPLICAS[:SIZE])


def test_gateway_that_leaves_hands_its_replicas_to_the_others() -> None:
    subsets = subsets_of(GATEWAYS)
    before = choices(subsets)
    gone = before[GATEWAYS[3]]
    del subsets[GATEWAYS[3]]
    after = choices(subsets)
    assert num_changes(before, after) == len(gone)
    assert Counter(each for subset in after.values() for each in subset) == dict.fromkeys(REPLICAS, 4)


def test_gateway_that_joins_is_ranked_as_if_all_had_known_it() -> None:
    subsets = subsets_of(GATEWAYS[:-1])
    choices(subsets)
    subsets[GATEWAYS[-1]] = Subset(GATEWAYS[-1], SIZE)
    assert choices(subsets) == choices(subsets_of(GATEWAYS))


def test_replicas_that_are_replaced_change_no_other_connection() -> None:
    subsets = subsets_of(GATEWAYS)
    before = choices(subsets, REPLICAS[20:])
    during = choices(subsets, REPLICAS[30:], num_expected=len(REPLICAS[20:]))
    assert during == {gateway: chosen - set(REPLICAS[20:30]) for gateway, chosen in before.items()}
    after = choices(subsets, [*REPLICAS[30:], *REPLICAS[:10]])
    assert {gateway: chosen - set(REPLICAS[:10]) for gateway, chosen in after.items()} == during


def test_replica_that_fails_for_one_gateway_is_replaced_by_the_next_one() -> None:
    subset = Subset(GATEWAYS[0], SIZE)
    chosen = subset.choose(GATEWAYS, REPLICAS)
    failed = sorted(chosen)[:3]
    replaced = subset.choose(GATEWAYS, REPLICAS, failed)
    assert chosen < replaced
    assert len(replaced - chosen) == len(failed)
    # One of the replacements fails as well, and another one takes its place.
    again = subset.choose(GATEWAYS, REPLICAS, [*failed, min(replaced - chosen)])
    assert len(again - set(failed)) == len(chosen)
    assert subset.choose(GATEWAYS, REPLICAS) == chosen


def test_gateway_that_does_not_know_the_others_uses_those_that_it_will_likely_use() -> None:
    chosen = Subset(GATEWAYS[0], SIZE).choose((), REPLICAS)
    known = Subset(GATEWAYS[0], SIZE).choose(GATEWAYS, REPLICAS)
    assert len(chosen) == SIZE
    assert len(chosen & known) > SIZE / 2
