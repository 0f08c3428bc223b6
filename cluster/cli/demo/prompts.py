"""The demo's requests: different lengths and sampling settings, some with a shared prompt prefix."""

from __future__ import annotations

from dataclasses import dataclass

from ....proto.sampling import SamplingParams

_LETTER = (
    "My dear sister,\n\nWe have had no rest since the rain began, and the road to the town is under water. "
    "The captain says that no ship will leave before the end of the week, and I have the whole day "
    "to sit by the fire and write to you of what has happened. "
)
_PLAY = "KING RICHARD:\nWhat news, my lord? The night is dark, and I have heard no word.\n\n"


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request; `title` describes its sampling."""

    title: str
    prompt: str
    params: SamplingParams


REQUESTS = (
    DemoRequest("greedy", "It was a dark evening, and", SamplingParams(max_tokens=96, temperature=0.0)),
    DemoRequest(
        "temperature 0.7", "The old man looked at", SamplingParams(max_tokens=64, temperature=0.7, seed=1)
    ),
    DemoRequest(
        "top-p 0.8", "She said that", SamplingParams(max_tokens=128, temperature=0.9, top_p=0.8, seed=2)
    ),
    DemoRequest("top-k 20", "The sea was", SamplingParams(max_tokens=80, temperature=0.8, top_k=20, seed=3)),
    DemoRequest("letter, greedy", _LETTER + "In the morning", SamplingParams(max_tokens=72, temperature=0.0)),
    DemoRequest(
        "letter, min-p 0.1",
        _LETTER + "You will",
        SamplingParams(max_tokens=96, temperature=1.0, min_p=0.1, seed=4),
    ),
    DemoRequest(
        "letter, top-p 0.9",
        _LETTER + "I am",
        SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=5),
    ),
    DemoRequest(
        "letter, until a full stop",
        _LETTER + "Last night",
        SamplingParams(max_tokens=120, temperature=0.7, top_p=0.9, seed=6, stop=(".",)),
    ),
    DemoRequest("play, greedy", _PLAY + "BUCKINGHAM:\n", SamplingParams(max_tokens=88, temperature=0.0)),
    DemoRequest(
        "play, top-k 40",
        _PLAY + "QUEEN MARGARET:\n",
        SamplingParams(max_tokens=112, temperature=0.9, top_k=40, seed=7),
    ),
    DemoRequest(
        "at least 32 tokens", "Holmes", SamplingParams(max_tokens=64, min_tokens=32, temperature=0.7, seed=8)
    ),
    DemoRequest(
        "two lines", "Prince Andrew", SamplingParams(max_tokens=100, temperature=0.7, seed=9, stop=("\n\n",))
    ),
)
