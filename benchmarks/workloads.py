"""Workloads for offline engines, with the same token ids and lengths in every run.

- w1: 64 requests at once; lengths lognormal, prompts of 16 to 768 tokens (mean 160), outputs of 8 to 384 (mean 100).
- w2: the same with 16 requests, for slow models.
- w3: one request, 128 tokens in and 128 out; the decode rate excludes the prefill.
- w4: one prompt of 1,024 tokens, time to its first token.
- w5: 32 requests with a shared prefix of 512 tokens and 32 own tokens each, 32 out.

Each repetition has new prompts, so that no prefix is cached from an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.common import Figure, median
from benchmarks.peers.engine import Requests

# Ids below the first are special or bytes in some tokenizers.
FIRST_TOKEN, LAST_TOKEN = 300, 30000
SINGLE_LEN = 128
LONG_LEN = 1024

# Wall time in seconds: one row per repetition, one number per batch.
Walls = list[list[float]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of requests, timed one after the other, and the figures computed from their times.

    Attributes:
        batches: repetition |-> its batches; the requests of a batch are submitted together.
        figures: wall times of at least one repetition |-> figures.
        least_repetitions: lower bound on repetitions; short workloads vary more.
    """

    batches: Callable[[int], list[Requests]]
    figures: Callable[[Walls], dict[str, Figure]]
    least_repetitions: int = 1

    def num_repetitions(self, wanted: int) -> int:
        return max(wanted, self.least_repetitions)


def token_ids(count: int, *key: int) -> list[int]:
    ids: list[int] = np.random.default_rng([1234, *key]).integers(FIRST_TOKEN, LAST_TOKEN, count).tolist()
    return ids


def lognormal_lens(rng: np.random.Generator, count: int, mean: float, low: int, high: int) -> list[int]:
    sigma = 0.8
    lens = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    rounded: list[int] = np.clip(np.rint(lens), low, high).astype(int).tolist()
    return rounded


def mixed(count: int, repetition: int) -> Requests:
    rng = np.random.default_rng(0)
    prompt_lens = lognormal_lens(rng, count, 160, 16, 768)
    output_lens = lognormal_lens(rng, count, 100, 8, 384)
    return [
        (token_ids(prompt_len, repetition, place), output_len)
        for place, (prompt_len, output_len) in enumerate(zip(prompt_lens, output_lens, strict=True))
    ]


def shared_prefix(count: int, repetition: int) -> Requests:
    prefix = token_ids(512, repetition, 10_000)
    return [(prefix + token_ids(32, repetition, 20_000 + place), 32) for place in range(count)]


def single(prompt_len: int, output_len: int, repetition: int) -> Requests:
    return [(token_ids(prompt_len, repetition, 30_000 + prompt_len + output_len), output_len)]


def warm_up() -> Requests:
    """Return requests that trigger compilation and first allocations before the measurement."""
    return [(prompt[:64], 8) for prompt, _ in mixed(8, 900)]


def throughput(make: Callable[[int], Requests]) -> Workload:
    """Return a workload of one batch that measures output tokens per second of wall time."""
    num_tokens = sum(length for _, length in make(0))

    def figures(walls: Walls) -> dict[str, Figure]:
        seconds = [wall for (wall,) in walls]
        return {
            "output_tokens_per_s": Figure(num_tokens / median(seconds), "tokens/s"),
            "output_tokens_per_s_best": Figure(num_tokens / min(seconds), "tokens/s"),
        }

    return Workload(lambda repetition: [make(repetition)], figures)


def _single_stream_batches(repetition: int) -> list[Requests]:
    return [single(SINGLE_LEN, 1, repetition), single(SINGLE_LEN, SINGLE_LEN, repetition)]


def _single_stream_figures(walls: Walls) -> dict[str, Figure]:
    firsts, wholes = zip(*walls, strict=True)
    num_decoded = SINGLE_LEN - 1
    return {
        "decode_tokens_per_s": Figure(num_decoded / (median(wholes) - median(firsts)), "tokens/s"),
        "decode_tokens_per_s_best": Figure(num_decoded / (min(wholes) - min(firsts)), "tokens/s"),
        "first_token_ms": Figure(1e3 * median(firsts), "ms"),
    }


def _long_prompt_figures(walls: Walls) -> dict[str, Figure]:
    seconds = [wall for (wall,) in walls]
    return {
        "first_token_ms": Figure(1e3 * median(seconds), "ms"),
        "first_token_ms_best": Figure(1e3 * min(seconds), "ms"),
    }


WORKLOADS = {
    "w1": throughput(partial(mixed, 64)),
    "w2": throughput(partial(mixed, 16)),
    "w3": Workload(_single_stream_batches, _single_stream_figures),
    "w4": Workload(
        lambda repetition: [single(LONG_LEN, 1, repetition)], _long_prompt_figures, least_repetitions=5
    ),
    "w5": throughput(partial(shared_prefix, 32)),
}
