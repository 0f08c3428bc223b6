"""Ways of choosing experts that every implementation is tested with."""

from __future__ import annotations

from quire.kernels.routing import Routing

# Of DeepSeek-V3, DeepSeek-V2, Kimi K2, Qwen3-MoE and Mixtral, and of other sizes.
ROUTINGS = [
    Routing(256, 8, 8, 4, 2, normalized=True, scale=2.5),
    Routing(160, 6, 8, 3, scale=16.0),
    Routing(384, 8, normalized=True, scale=2.827),
    Routing(128, 8, normalized=True),
    Routing(8, 2, normalized=True),
    Routing(60, 4, scale=0.5),
    Routing(16, 1, scale=3.0),
    Routing(512, 8, normalized=True),  # torch.topk chooses few of many by another algorithm
    Routing(7, 7, normalized=True),
    Routing(30, 3, 15, 5, 2),
    Routing(1, 1, normalized=True),
]
