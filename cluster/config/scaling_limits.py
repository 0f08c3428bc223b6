"""ScalingLimits: how many replicas a deployment may have, and when to add or remove them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """What an operator allows and wants.

    Attributes:
        min_replicas, max_replicas: bounds of the target; 0 at least: the model may be without a replica while nobody
            asks for it.
        target_wait_s: how long a request may wait before its prompt is computed.
        target_use: share of a replica's throughput that is planned with; the rest is for bursts.
        target_memory_use: the same of its KV blocks and rows.
        up_delay_s, down_delay_s: how long more, or fewer, replicas must have been wanted.
        max_step_up, max_step_down: replicas that one decision may add or take away.
        cooldown_s: between a change and the next step down.
        idle_timeout_s: without a request before the last replica goes, where `min_replicas` is 0.
        cold_start_s: what a replica is taken to need until it is ready, while none has been measured.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_wait_s: float = 10.0
    target_use: float = 0.65
    target_memory_use: float = 0.9
    up_delay_s: float = 2.0
    down_delay_s: float = 300.0
    max_step_up: int = 8
    max_step_down: int = 1
    cooldown_s: float = 15.0
    idle_timeout_s: float = 900.0
    cold_start_s: float = 60.0

    def __post_init__(self) -> None:
        _check(self.min_replicas >= 0, f"min_replicas is {self.min_replicas}, must be 0 or more")
        _check(
            self.max_replicas >= max(1, self.min_replicas),
            f"max_replicas is {self.max_replicas}, must be 1 or more and no less than min_replicas "
            f"({self.min_replicas})",
        )
        for name in ("target_use", "target_memory_use"):
            value = getattr(self, name)
            _check(0 < value <= 1, f"{name} is {value:g}, must be above 0 and at most 1")
        for name in ("max_step_up", "max_step_down"):
            _check(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, must be 1 or more")
        for name in ("target_wait_s", "idle_timeout_s"):
            value = getattr(self, name)
            _check(0 < value < math.inf, f"{name} is {value:g}, must be above 0 and finite")
        for name in ("up_delay_s", "down_delay_s", "cooldown_s", "cold_start_s"):
            value = getattr(self, name)
            _check(0 <= value < math.inf, f"{name} is {value:g}, must be 0 or more and finite")

    def clamp(self, num_replicas: int) -> int:
        return min(max(num_replicas, self.min_replicas), self.max_replicas)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)
