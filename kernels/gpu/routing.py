"""Choice of each token's experts in one launch: a program holds all scores of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..routing import EPSILON, Routing

# Scores per warp. The best of them are found by reductions, which take shuffles within a warp and barriers beyond.
SCORES_PER_WARP = 512


@triton.jit
def _select_experts(
    scores_ptr,  # [T, X] float32
    correction_ptr,  # [X] float32, or None
    weights_ptr,  # [T, K] float32
    ids_ptr,  # [T, K] int64
    stride_scores,
    scale,
    epsilon,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (T,)
    row = tl.program_id(0).to(tl.int64)
    lowest = float("-inf")
    offs_x, offs_k = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    mask = offs_x < NUM_EXPERTS
    scores = tl.load(scores_ptr + row * stride_scores + offs_x, mask=mask, other=0.0)
    left = scores
    if correction_ptr is not None:
        left += tl.load(correction_ptr + offs_x, mask=mask, other=0.0)
    # Numbers that are not comparable would choose an expert that is not there.
    left = tl.where(mask & (left == left), left, lowest)
    if NUM_GROUPS > 1:
        groups, offs_g = offs_x // (NUM_EXPERTS // NUM_GROUPS), tl.arange(0, BLOCK_G)
        left_groups = tl.full([BLOCK_G], lowest, tl.float32)
        for group in range(NUM_GROUPS):
            own = tl.where(groups == group, left, lowest)
            best = tl.max(own, 0)
            if GROUP_BEST == 2:
                best += tl.max(tl.where(offs_x == tl.argmax(own, 0), lowest, own), 0)
            left_groups = tl.where(offs_g == group, best, left_groups)
        is_selected = offs_x < 0
        for _ in range(NUM_TOP_GROUPS):
            group = tl.argmax(left_groups, 0)
            is_selected = is_selected | (groups == group)
            left_groups = tl.where(offs_g == group, lowest, left_groups)
        left = tl.where(is_selected, left, lowest)
    ids, weights = tl.zeros([BLOCK_K], tl.int64), tl.zeros([BLOCK_K], tl.float32)
    for choice in range(TOP_K):
        expert = tl.argmax(left, 0)
        weight = tl.sum(tl.where(offs_x == expert, scores, 0.0), 0)
        ids = tl.where(offs_k == choice, expert.to(tl.int64), ids)
        weights = tl.where(offs_k == choice, weight, weights)
        left = tl.where(offs_x == expert, lowest, left)
    if NORMALIZED:
        weights = weights / (tl.sum(weights, 0) + epsilon)
    places, is_choice = row * TOP_K + offs_k, offs_k < TOP_K
    tl.store(weights_ptr + places, weights * scale, mask=is_choice)
    tl.store(ids_ptr + places, ids, mask=is_choice)


def select_experts(scores: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See kernels.routing. Of equal scores the expert with the lower number comes first."""
    num_tokens, num_experts = scores.shape
    assert scores.dtype == torch.float32
    assert scores.stride(1) == 1
    assert num_experts == routing.num_experts
    assert routing.group_best in (1, 2)
    shape, device = (num_tokens, routing.top_k), scores.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    expert_ids = torch.empty(shape, dtype=torch.int64, device=device)
    if num_tokens == 0:
        return weights, expert_ids
    block_experts = triton.next_power_of_2(num_experts)
    _select_experts[(num_tokens,)](
        scores,
        correction,
        weights,
        expert_ids,
        scores.stride(0),
        routing.scale,
        EPSILON,
        NUM_EXPERTS=num_experts,
        TOP_K=routing.top_k,
        NUM_GROUPS=routing.num_groups,
        NUM_TOP_GROUPS=routing.num_top_groups,
        GROUP_BEST=routing.group_best,
        NORMALIZED=routing.normalized,
        BLOCK_X=block_experts,
        BLOCK_G=triton.next_power_of_2(routing.num_groups),
        BLOCK_K=triton.next_power_of_2(routing.top_k),
        num_warps=max(1, min(8, block_experts // SCORES_PER_WARP)),
    )
    return weights, expert_ids
