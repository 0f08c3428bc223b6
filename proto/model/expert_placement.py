"""Placement of a mixture's experts in the slots of its ranks, and the balance of their load.

After EPLB (DeepSeek-AI, github.com/deepseek-ai/EPLB, its global policy; *DeepSeek-V3 Technical Report*, 2024): the
most loaded experts get further replicas, and replicas are packed by falling load onto the least loaded rank.
Here ranks may have different numbers of slots, no rank gets an expert twice, and what can stay in its slot stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from .parallel_split import own_indices

# Expert of each slot; a rank has adjacent slots.
Placement = tuple[int, ...]


def slots_of_ranks(num_slots: int, num_ranks: int) -> list[range]:
    """Return the slots of each rank: adjacent ones; the first ranks have one more."""
    return [own_indices(rank, num_ranks, num_slots) for rank in range(num_ranks)]


def first_placement(num_experts: int, num_slots: int) -> Placement:
    """Return the placement before any load is known: experts in order, and the first ones once more."""
    return tuple(slot % num_experts for slot in range(num_slots))


def rank_loads(loads: Sequence[float], placement: Placement, num_ranks: int) -> list[float]:
    """Return the load of each rank, if the replicas of an expert share its load.

    Args:
        loads: of each expert.
    """
    counts = _count(placement, len(loads))
    return [
        sum(loads[placement[slot]] / counts[placement[slot]] for slot in slots)
        for slots in slots_of_ranks(len(placement), num_ranks)
    ]


def imbalance(loads: Sequence[float], placement: Placement, num_ranks: int) -> float:
    """Return the load of the busiest rank as a multiple of the mean; 1 without load."""
    of_ranks = rank_loads(loads, placement, num_ranks)
    return max(of_ranks) * num_ranks / sum(of_ranks) if sum(of_ranks) else 1.0


def rebalance(loads: Sequence[float], present: Placement, num_ranks: int) -> Placement:
    """Return a placement with balanced loads, in as many slots as the present one has.

    Args:
        loads: of each expert, as measured.
    """
    slots = slots_of_ranks(len(present), num_ranks)
    counts = _replicate(loads, len(present), num_ranks)
    packs = _pack(loads, counts, [len(own) for own in slots])
    placement = list(present)
    for own, pack in zip(slots, _match(packs, slots, present), strict=True):
        arriving = sorted(pack - {present[slot] for slot in own})
        staying: set[int] = set()
        for slot in own:
            if present[slot] in pack and present[slot] not in staying:
                staying.add(present[slot])
            else:
                placement[slot] = arriving.pop()
    return tuple(placement)


def _count(placement: Placement, num_experts: int) -> list[int]:
    counts = [0] * num_experts
    for expert in placement:
        counts[expert] += 1
    return counts


def _replicate(loads: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """Return the number of replicas of each expert, at most one for each rank: always one more of the most loaded."""
    counts = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        fitting = [expert for expert, count in enumerate(counts) if count < num_ranks]
        counts[max(fitting, key=lambda expert: loads[expert] / counts[expert])] += 1
    return counts


def _pack(loads: Sequence[float], counts: Sequence[int], sizes: Sequence[int]) -> list[set[int]]:
    """Return the experts of each rank, of which it has as many as `sizes` says.

    The heaviest replicas come first. A rank that could not be filled any more without having an expert twice is
    filled by an exchange with another one.
    """
    packs: list[set[int]] = [set() for _ in sizes]
    totals = [0.0] * len(sizes)
    share = [load / count for load, count in zip(loads, counts, strict=True)]
    order = sorted(range(len(loads)), key=lambda expert: (-share[expert], expert))
    for expert in [each for each in order for _ in range(counts[each])]:
        open_ranks = [rank for rank, size in enumerate(sizes) if len(packs[rank]) < size]
        fitting = [rank for rank in open_ranks if expert not in packs[rank]]
        if fitting:
            rank = min(fitting, key=lambda rank: (totals[rank], rank))
            packs[rank].add(expert)
            totals[rank] += share[expert]
            continue
        # All open ranks have it: a rank that has not takes it, and gives one that an open rank lacks.
        full, giver = open_ranks[0], next(rank for rank in range(len(packs)) if expert not in packs[rank])
        given = min(packs[giver] - packs[full], key=lambda other: (abs(share[other] - share[expert]), other))
        packs[giver] = packs[giver] - {given} | {expert}
        packs[full].add(given)
        totals[giver] += share[expert] - share[given]
        totals[full] += share[given]
    return packs


def _match(packs: list[set[int]], slots: Sequence[range], present: Placement) -> list[set[int]]:
    """Return the packs by rank: ranks with as many slots are alike, so each takes one that it has most of."""
    left = list(packs)
    matched = []
    for own in slots:
        has = {present[slot] for slot in own}
        best = max((pack for pack in left if len(pack) == len(own)), key=lambda pack: len(pack & has))
        left.remove(best)
        matched.append(best)
    return matched
