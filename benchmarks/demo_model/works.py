"""Training texts of the demo model, and the held-out part of each."""

from __future__ import annotations

import math
import random
import re
from hashlib import sha256
from pathlib import Path

HELD_OUT_SHARE = 0.05  # the end of every work
MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 400, 12_000  # a few paragraphs to a chapter


# File |-> beginning of its sha256; cluster/cli/demo/model/README.md names the origins.
WORKS = {
    "tinyshakespeare.txt": "016ab9b6705d6b68",
    "austen_pride_and_prejudice.txt": "a5d5040c7cf4f9b2",
    "doyle_adventures_of_sherlock_holmes.txt": "5fc1221808710ad7",
    "melville_moby_dick.txt": "7e5bfda55a613f7f",
    "shelley_frankenstein.txt": "cc7aec8361a13e66",
    "dickens_tale_of_two_cities.txt": "e70d7e7d96a111c6",
    "dickens_great_expectations.txt": "984955a7f7b94902",
    "tolstoy_war_and_peace.txt": "c7f766d88cb0fd66",
}


def read_works(directory: Path) -> list[str]:
    """Return the texts of WORKS in order.

    Raises:
        ValueError: a file's hash differs from the table's.
    """
    texts = []
    for name, expected in WORKS.items():
        content = (directory / name).read_bytes()
        digest = sha256(content).hexdigest()
        if not digest.startswith(expected):
            raise ValueError(f"{name}: sha256 is {digest[:16]}, the table says {expected}")
        texts.append(content.decode())
    return texts


def split_held_out(text: str) -> tuple[str, str]:
    """Split a text at the first paragraph end in its last HELD_OUT_SHARE; return (training, held out)."""
    cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT_SHARE)))
    return text[:cut], text[cut:].strip()


def split_passages(text: str, rng: random.Random) -> list[str]:
    """Split a text into passages of whole paragraphs; the lengths are log-uniform."""
    passages: list[str] = []
    current, wanted_chars = "", 0.0
    for paragraph in re.split(r"\n{2,}", text.strip()):
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if not wanted_chars:
            wanted_chars = math.exp(rng.uniform(math.log(MIN_PASSAGE_CHARS), math.log(MAX_PASSAGE_CHARS)))
        if len(current) >= wanted_chars:
            passages.append(current)
            current, wanted_chars = "", 0.0
    return [*passages, current] if current else passages
