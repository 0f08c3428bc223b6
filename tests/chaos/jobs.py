"""Jobs: the mixed requests of the work."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from quire import SamplingParams, StructuredOutputsParams

# Of one that is so long, reading the blocks from another replica may be faster than computing them.
_TALE = " ".join(
    f"The {number}th sailor told what he had seen of the whale on the voyage." for number in range(20)
)
PROMPTS = (
    "It was",
    "The captain of the ship",
    "Call me",
    "There is a",
    "Of the whale he said that",
    f"{_TALE} And",
)
NUM_TOKENS = 40
ADAPTER = "sea"  # its name at the servers


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, as both servers take it.

    Attributes:
        over_http: settings of ``/v1/completions``; None for a kind that only gRPC has.
        model: an adapter; empty for the server's model.
    """

    params: SamplingParams
    over_http: dict[str, Any] | None
    model: str = ""


def _kind(*, is_http: bool = True, regex: str = "", model: str = "", **settings: Any) -> Kind:
    settings = {"max_tokens": NUM_TOKENS, "ignore_eos": not regex} | settings
    body = {**settings, "stop": list(settings.get("stop", ()))}
    if regex:
        settings["structured_outputs"] = StructuredOutputsParams(regex=regex)
        body["structured_outputs"] = {"regex": regex}
    if model:
        body["model"] = model
    return Kind(SamplingParams(**settings), body if is_http else None, model)


KINDS: dict[str, Kind] = {
    "greedy": _kind(temperature=0.0),
    "seed": _kind(temperature=0.9, seed=11),
    "n": _kind(temperature=0.8, seed=5, n=3),
    "penalties": _kind(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.3),
    "stop": _kind(temperature=0.9, seed=2, stop=(" the",)),
    "form": _kind(temperature=0.9, seed=7, regex="([a-z]{3,9} [0-9]{2}){4}"),
    "adapter": _kind(temperature=0.9, seed=9, model=ADAPTER),
    "logprobs": _kind(is_http=False, temperature=0.0, logprobs=3),
    "beams": _kind(is_http=False, beam_width=3, n=2, max_tokens=24),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the work.

    Attributes:
        door: ``grpc``, ``http`` or ``http-stream``.
    """

    kind: str
    prompt: str
    door: str


# Of all outputs: the texts; over gRPC also the tokens, their log-probabilities, rounded, and the finish reasons.
Answer = list[Any]


def make_jobs(count: int, rng: random.Random) -> list[Job]:
    """Return random requests of all kinds through all doors."""
    jobs = []
    for _ in range(count):
        name = rng.choice(tuple(KINDS))
        doors = ("grpc",) if KINDS[name].over_http is None else ("grpc", "http", "http-stream")
        jobs.append(Job(name, rng.choice(PROMPTS), rng.choice(doors)))
    return jobs
