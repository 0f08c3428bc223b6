"""Choices of experts against the routers of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.proto.errors import ConfigError
from quire.proto.model.experts import ROUTINGS, Experts
from quire.worker.models.moe.expert_routing import ExpertChoice

EXPERTS = Experts(count=24, top_k=4, intermediate_size=8, normalized=False)
GROUPS = {"n_group": 6, "topk_group": 3}


def route(router: Any, bias: Tensor | None, x: Tensor, experts: Experts) -> None:
    """Check that `ExpertChoice` equals a router of transformers, in any order of a token's experts."""
    with torch.no_grad():
        logits, expected, expected_ids = router(x)
    weights, ids = ExpertChoice(experts).choose(logits, bias)
    expected_ids, order = expected_ids.sort(dim=-1)
    ids, own_order = ids.sort(dim=-1)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.gather(-1, own_order), expected.gather(-1, order))


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_group_limited_routing_equals_transformers(method: str) -> None:
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=32, num_attention_heads=4, n_routed_experts=24, num_experts_per_tok=4, topk_method=method,
        routed_scaling_factor=16.0, **GROUPS,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    experts = replace(EXPERTS, scale=16.0)
    if method != "greedy":
        experts = replace(experts, num_groups=6, num_top_groups=3)
    route(router, None, torch.randn(50, 32), experts)


@pytest.mark.parametrize("groups", [GROUPS, {"n_group": 1, "topk_group": 1}], ids=["groups", "one group"])
@pytest.mark.parametrize("normalized", [True, False])
def test_corrected_sigmoid_routing_equals_transformers(groups: dict[str, int], normalized: bool) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=32, n_routed_experts=24, num_experts_per_tok=4, norm_topk_prob=normalized,
        routed_scaling_factor=2.5, **groups,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias)
    experts = replace(
        EXPERTS,
        normalized=normalized,
        score="sigmoid",
        num_groups=groups["n_group"],
        num_top_groups=groups["topk_group"],
        group_score="top2",
        correction_bias=True,
        scale=2.5,
    )
    route(router, router.e_score_correction_bias, torch.randn(50, 32), experts)


def test_choice_is_within_the_best_groups() -> None:
    experts = replace(EXPERTS, num_groups=6, num_top_groups=2)
    logits = torch.randn(200, 24)
    _, ids = ExpertChoice(experts).choose(logits)
    groups = logits.unflatten(-1, (6, 4)).amax(-1).topk(2).indices
    assert torch.all((ids[:, :, None] // 4 == groups[:, None]).any(-1))


def test_sparsemixer_routing_equals_transformers() -> None:
    from transformers.models.phimoe.configuration_phimoe import PhimoeConfig
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

    config = PhimoeConfig(hidden_size=32, num_local_experts=24, router_jitter_noise=0.2)
    router = PhimoeTopKRouter(config).eval()
    torch.nn.init.normal_(router.weight)
    experts = replace(EXPERTS, top_k=2, score="sparsemixer", jitter=0.2)
    route(router, None, torch.randn(50, 32), experts)


def test_sparsemixer_routing_is_of_two_experts() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok is 4, must be 2"):
        ROUTINGS["sparsemixer"](EXPERTS, {})
