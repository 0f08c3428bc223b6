"""Measures: figures of a load from what became of its requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...simulation.run import Targets
from .load import Outcome

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Of a normal distribution, both sides of a confidence interval of 95 %.
_Z = 1.96


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return count, mean, quantiles and their confidence intervals of 95 %, by order statistics."""
    if not values:
        return {"count": 0}
    ordered = np.sort(np.asarray(values, np.float64))
    summary: dict[str, Any] = {"count": ordered.size, "mean": float(ordered.mean())}
    for name, share in QUANTILES.items():
        margin = _Z * math.sqrt(share * (1 - share) / ordered.size)
        summary[name] = _quantile(ordered, share)
        summary[f"{name}_interval"] = [_quantile(ordered, share - margin), _quantile(ordered, share + margin)]
    return summary


def _quantile(ordered: npt.NDArray[np.float64], share: float) -> float:
    place = math.ceil(share * ordered.size) - 1
    return float(ordered[min(max(place, 0), ordered.size - 1)])


@dataclass(frozen=True, slots=True)
class Measures:
    """Outcomes of a load and their figures.

    Attributes:
        outcomes: the outcomes after the warm-up.
        label: what was varied, for example the rate.
    """

    outcomes: Sequence[Outcome]
    targets: Targets
    label: str = ""

    @property
    def served(self) -> list[Outcome]:
        return [each for each in self.outcomes if not each.error]

    @property
    def seconds(self) -> float:
        """Return the time from the first due time to the last end."""
        if not self.outcomes:
            return 0.0
        return max(each.ended_s for each in self.outcomes) - min(each.due_s for each in self.outcomes)

    @property
    def offered_per_s(self) -> float:
        """Return the requests per second between the first and the last due time."""
        dues = [each.due_s for each in self.outcomes]
        return (len(dues) - 1) / max(1e-9, max(dues) - min(dues)) if len(dues) > 1 else 0.0

    @property
    def num_good(self) -> int:
        return sum(self.targets.hold(each.ttft_s, each.mean_gap_s, each.e2e_s) for each in self.served)

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON has them; times are in seconds."""
        served, seconds = self.served, max(self.seconds, 1e-9)
        return {
            "label": self.label,
            "requests": len(self.outcomes),
            "errors": dict(Counter(each.error for each in self.outcomes if each.error)),
            "seconds": self.seconds,
            "offered_requests_per_s": self.offered_per_s,
            "requests_per_s": len(served) / seconds,
            "output_tokens_per_s": sum(len(each.token_times) for each in served) / seconds,
            "prompt_tokens_per_s": sum(each.num_prompt_tokens for each in served) / seconds,
            "good_requests": self.num_good,
            "goodput_requests_per_s": self.num_good / seconds,
            "ttft_s": summarize([each.ttft_s for each in served]),
            "itl_s": summarize([gap for each in served for gap in each.gaps]),
            "e2e_s": summarize([each.e2e_s for each in served]),
            "lateness_s": summarize([each.sent_s - each.due_s for each in self.outcomes]),
        }


def is_saturated(measures: Measures, share: float = 0.9) -> bool:
    """Return whether fewer than `share` of a load's requests are good, or are served as fast as they are sent."""
    if not measures.outcomes:
        return False
    is_behind = len(measures.served) / max(measures.seconds, 1e-9) < share * measures.offered_per_s
    return is_behind or measures.num_good < share * len(measures.outcomes)
