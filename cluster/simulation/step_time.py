"""StepTime: the duration of a step by terms of a roofline, and its fit to measured steps.

A step reads the weights and the KV of its sequences, multiplies, and sums over the ranks. Each term is the time that
the work takes at the peak of the device, times a coefficient: 1 for a perfect implementation. Coefficients that were
not measured are assumptions (`ASSUMED`, `ASSUMED_ON_CPU`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...proto.errors import ConfigError
from ...scheduler import MeasuredStep, StepWork

_FIT_ROUNDS = 40
# Relative errors up to it count by their square.
_SMALL_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a rank has for itself, as its data sheet describes it.

    Attributes:
        flops_per_s: dense products of 16-bit numbers; of 32-bit ones on a CPU.
        link_bytes_per_s: in one direction, to the other ranks of a host.
        link_latency_s: of one all-reduce of few bytes.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float = 10e-6


# The CPU is two cores of a server with AVX-512 or AVX2; calibrate for a real one.
DEVICES = {
    each.name: each
    for each in (
        Device("h200", 989e12, 4.8e12, 450e9),
        Device("h100", 989e12, 3.35e12, 450e9),
        Device("b200", 2250e12, 8.0e12, 900e9),
        Device("a100", 312e12, 2.039e12, 300e9),
        Device("l4", 121e12, 300e9, 32e9, 20e-6),
        Device("cpu", 100e9, 10e9, 5e9, 120e-6),
    )
}


def find_device(name: str) -> Device:
    """Return a device by name. Raises ConfigError if it is not known."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"gpu is {name!r}, must be one of {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes and operations of one rank of a model.

    Attributes:
        weight_bytes: read by every step; without the experts that a router chooses from.
        expert_bytes: of all such experts.
        expert_share: share of the experts that one token uses.
        flops_per_token: of the products with weights.
        flops_per_pair: of attention, for each computed token and each token that it attends to.
        kv_bytes_per_token: read for each token of a sequence.
        num_all_reduces: in a step; 0 with one rank.
        all_reduce_bytes_per_token: sent in each of them.
    """

    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    expert_bytes: float = 0.0
    expert_share: float = 1.0
    flops_per_pair: float = 0.0
    num_all_reduces: int = 0
    all_reduce_bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds of a step without work, and for each term its time over the time at the device's peak.

    Attributes:
        fixed_s: of any step.
        sequence_s: for each row.
        prompt_step_s: more, of a step with prompts: no recorded graph or fused call runs it.
        new_s: for each sequence that begins.
        ended_s: for each sequence that has ended.
    """

    fixed_s: float = 0.0
    sequence_s: float = 0.0
    prompt_step_s: float = 0.0
    new_s: float = 0.0
    ended_s: float = 0.0
    weights: float = 1.0
    flops: float = 1.0
    kv: float = 1.0
    attention: float = 1.0
    all_reduce: float = 1.0


# Nobody has measured them: what well-made kernels reach, and a launch of a recorded graph with a sampler.
ASSUMED = Coefficients(
    1.5e-3, 3e-6, 5e-4, 1e-4, 0.0, weights=1.25, flops=1.6, kv=1.4, attention=2.5, all_reduce=1.5
)
ASSUMED_ON_CPU = Coefficients(
    1.5e-3, 2e-5, 1e-3, 2e-4, 5e-4, weights=1.25, flops=1.5, kv=1.5, attention=2.0, all_reduce=1.5
)


class TimesSteps(Protocol):
    """Gives simulated steps their duration."""

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        ...

    def decode_seconds(self, num_rows: int, num_read: int, count: int) -> npt.NDArray[np.float64]:
        """Return the seconds of steps in which the same rows decode; the first reads `num_read` tokens' KV."""
        ...


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of a model's steps on a device.

    Attributes:
        source: how the coefficients are known, for people.
    """

    cost: ModelCost
    device: Device
    coefficients: Coefficients = Coefficients()
    source: str = "assumed"

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        c, (weights, flops, kv, attention, all_reduce) = self.coefficients, self.terms(work)
        return (
            c.fixed_s
            + c.sequence_s * work.num_sequences
            + c.prompt_step_s * (work.num_pairs > 0)
            + c.new_s * work.num_new
            + c.ended_s * work.num_ended
            + max(c.weights * weights, c.flops * flops)
            + c.kv * kv
            + c.attention * attention
            + c.all_reduce * all_reduce
        )

    def decode_seconds(self, num_rows: int, num_read: int, count: int) -> npt.NDArray[np.float64]:
        """Return the seconds of steps in which the same rows decode; the first reads `num_read` tokens' KV.

        Terms are added in the order of `seconds`, so that each is the same number.
        """
        c, (weights, flops, _, _, all_reduce) = self.coefficients, self.terms(StepWork(num_rows, num_rows, 0))
        reads = num_read + num_rows * np.arange(count)
        kv = reads * self.cost.kv_bytes_per_token / self.device.bytes_per_s
        base = c.fixed_s + c.sequence_s * num_rows + max(c.weights * weights, c.flops * flops)
        return np.asarray(base + c.kv * kv + c.all_reduce * all_reduce, np.float64)

    def terms(self, work: StepWork) -> tuple[float, float, float, float, float]:
        """Return the seconds of weights, products, KV, attention and all-reduces at the device's peak."""
        cost, device = self.cost, self.device
        expert_bytes = cost.expert_bytes and cost.expert_bytes * (
            1 - (1 - cost.expert_share) ** work.num_tokens
        )
        sent = cost.all_reduce_bytes_per_token * work.num_tokens
        return (
            (cost.weight_bytes + expert_bytes) / device.bytes_per_s,
            work.num_tokens * cost.flops_per_token / device.flops_per_s,
            work.num_read_tokens * cost.kv_bytes_per_token / device.bytes_per_s,
            work.num_pairs * cost.flops_per_pair / device.flops_per_s,
            cost.num_all_reduces * (device.link_latency_s + sent / device.link_bytes_per_s),
        )


def fit_coefficients(step_time: StepTime, steps: Sequence[MeasuredStep]) -> Coefficients:
    """Return the coefficients with the least relative errors.

    Larger errors count by their size, not by their square: they are interruptions of the process. A step is limited
    by reading the weights or by their products, and which of the two depends on the coefficients: the fit begins with
    those of `step_time`, and is repeated with its own result. Terms that no step shows keep them.

    Raises:
        ConfigError: there are fewer steps than coefficients.
    """
    names = [each.name for each in fields(Coefficients)]
    if len(steps) < len(names):
        raise ConfigError(f"{len(steps)} measured steps, must be at least {len(names)}")
    terms = np.array([step_time.terms(step.work) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    works = [step.work for step in steps]
    counts = np.array(
        [(1.0, work.num_sequences, work.num_pairs > 0, work.num_new, work.num_ended) for work in works]
    )
    found = np.array([getattr(step_time.coefficients, name) for name in names])
    of_weights, of_flops = names.index("weights"), names.index("flops")
    weights = np.ones(len(steps))
    for _ in range(_FIT_ROUNDS):
        is_limited_by_weights = found[of_weights] * terms[:, 0] >= found[of_flops] * terms[:, 1]
        columns = np.column_stack(
            [counts, terms[:, 0] * is_limited_by_weights, terms[:, 1] * ~is_limited_by_weights, terms[:, 2:]]
        )
        scaled = columns / seconds[:, None]
        before = found
        found = _least_squares(weights[:, None] * scaled, weights, found)
        if np.allclose(found, before, rtol=1e-6):
            break
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ found - 1), _SMALL_ERROR))
    return Coefficients(*found.tolist())


def _least_squares(
    columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64], start: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return numbers of at least 0 for which columns @ numbers is nearest to `wanted`, and of these the nearest to
    `start`. Numbers that would be negative are set to 0, the most negative first.
    """
    numbers = start.copy()
    scales = np.sqrt((columns**2).sum(axis=0))
    free = scales > 0
    while free.any():
        scaled = columns[:, free] / scales[free]
        change = np.linalg.lstsq(scaled, wanted - columns @ numbers, rcond=1e-9)[0] / scales[free]
        found = numbers[free] + change
        lowest = int(np.argmin(found * scales[free]))
        if found[lowest] >= 0:
            numbers[free] = found
            break
        negative = np.flatnonzero(free)[lowest]
        numbers[negative], free[negative] = 0.0, False
    return numbers


def relative_errors(step_time: StepTime, steps: Sequence[MeasuredStep]) -> npt.NDArray[np.float64]:
    """Return (predicted - measured) / measured of each step."""
    predicted = np.array([step_time.seconds(step.work) for step in steps])
    measured = np.array([step.seconds for step in steps])
    errors: npt.NDArray[np.float64] = predicted / measured - 1.0
    return errors


def write_coefficients(path: Path, device: str, coefficients: Coefficients, facts: dict[str, Any]) -> None:
    """Write coefficients as JSON, with `facts` about the measurement."""
    path.write_text(
        json.dumps({"device": device, "coefficients": asdict(coefficients), **facts}, indent=1) + "\n"
    )


def read_coefficients(path: Path, device: str) -> Coefficients:
    """Return the coefficients of a file that `quire calibrate` wrote.

    Raises:
        ConfigError: the file cannot be read, or is of another device.
    """
    try:
        stored = json.loads(path.read_text())
        found = Coefficients(**{name: float(value) for name, value in stored["coefficients"].items()})
        measured_on = str(stored["device"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"coefficients {path} cannot be read: {error!r}") from error
    if measured_on != device:
        raise ConfigError(f"coefficients {path} were measured on {measured_on}, not on {device}")
    return found
