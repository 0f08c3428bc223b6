"""ScalingLimits: the bounds of a deployment's replica count, and the autoscaler's settings."""

from dataclasses import dataclass

from ...proto.errors import ConfigError
from .checks import at_least, not_negative_finite, positive_finite, share
from .option import option, validate_options

FLEET = "Fleet"


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """The bounds of the replica count, and when the autoscaler changes it. Raises ConfigError on a bad value."""

    min_replicas: int = option(
        1,
        help="Fewest replicas; with 0 a model without requests has none.",
        unit="replicas",
        check=at_least(0),
        group=FLEET,
    )
    max_replicas: int = option(1, help="Most replicas.", unit="replicas", check=at_least(1), group=FLEET)
    target_wait_s: float = option(
        10.0,
        help="Longest acceptable wait of a request before its prompt is computed.",
        unit="seconds",
        check=positive_finite,
        group=FLEET,
    )
    target_use: float = option(
        0.65,
        help="Share of a replica's throughput to plan with; the rest absorbs bursts.",
        unit="share",
        check=share,
        group=FLEET,
    )
    target_memory_use: float = option(
        0.9,
        help="Share of a replica's KV blocks and rows to plan with.",
        unit="share",
        check=share,
        group=FLEET,
    )
    up_delay_s: float = option(
        2.0,
        help="Add replicas after more were needed for this long.",
        unit="seconds",
        check=not_negative_finite,
        group=FLEET,
    )
    down_delay_s: float = option(
        300.0,
        help="Remove replicas after fewer were enough for this long.",
        unit="seconds",
        check=not_negative_finite,
        group=FLEET,
    )
    max_step_up: int = option(
        8, help="Replicas that one decision may add.", unit="replicas", check=at_least(1), group=FLEET
    )
    max_step_down: int = option(
        1, help="Replicas that one decision may remove.", unit="replicas", check=at_least(1), group=FLEET
    )
    cooldown_s: float = option(
        15.0,
        help="Time between a change and the next removal.",
        unit="seconds",
        check=not_negative_finite,
        group=FLEET,
    )
    idle_timeout_s: float = option(
        900.0,
        help="Remove the last replica after this long without a request, if --min-replicas is 0.",
        unit="seconds",
        check=positive_finite,
        group=FLEET,
    )
    cold_start_s: float = option(
        60.0,
        help="Assumed start time of a replica until one has been measured.",
        unit="seconds",
        check=not_negative_finite,
        group=FLEET,
    )

    def __post_init__(self) -> None:
        validate_options(self)
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, must be at least min_replicas ({self.min_replicas})"
            )

    def clamp(self, num_replicas: int) -> int:
        return min(max(num_replicas, self.min_replicas), self.max_replicas)
