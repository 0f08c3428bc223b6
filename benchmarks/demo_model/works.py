"""Training texts of the demo model, and the held-out part of each."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

HELD_OUT_SHARE = 0.05  # the end of every work
MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 400, 12_000  # a few paragraphs to a chapter


@dataclass(frozen=True)
class Work:
    """A public-domain text with the origin and the hash of its transcription."""

    file: str
    title: str
    author: str
    year: str
    origin: str  # GitHub repository and commit
    sha256_prefix: str


WORKS = (
    Work("tinyshakespeare.txt", "part of the plays", "William Shakespeare (d. 1616)", "1589-1613",
         "karpathy/char-rnn 6f9487a", "016ab9b6705d6b68"),
    Work("austen_pride_and_prejudice.txt", "Pride and Prejudice", "Jane Austen (d. 1817)", "1813",
         "GITenberg/Pride-and-Prejudice_1342 81db45c", "a5d5040c7cf4f9b2"),
    Work("doyle_adventures_of_sherlock_holmes.txt", "The Adventures of Sherlock Holmes",
         "Arthur Conan Doyle (d. 1930)", "1892",
         "GITenberg/The-Adventures-of-Sherlock-Holmes_1661 7e5dd27", "5fc1221808710ad7"),
    Work("melville_moby_dick.txt", "Moby-Dick", "Herman Melville (d. 1891)", "1851",
         "GITenberg/Moby-Dick--Or-The-Whale_2701 bdf1948", "7e5bfda55a613f7f"),
    Work("shelley_frankenstein.txt", "Frankenstein", "Mary Shelley (d. 1851)", "1818, 1831",
         "GITenberg/Frankenstein_84 c98a483", "cc7aec8361a13e66"),
    Work("dickens_tale_of_two_cities.txt", "A Tale of Two Cities", "Charles Dickens (d. 1870)", "1859",
         "GITenberg/A-Tale-of-Two-Cities_98 0f6111b", "e70d7e7d96a111c6"),
    Work("dickens_great_expectations.txt", "Great Expectations", "Charles Dickens (d. 1870)", "1861",
         "GITenberg/Great-Expectations_1400 889db0e", "984955a7f7b94902"),
    Work("tolstoy_war_and_peace.txt", "War and Peace",
         "Leo Tolstoy (d. 1910), English by Louise and Aylmer Maude (d. 1939, 1938)", "1869, English 1923",
         "GITenberg/War-and-Peace_2600 fa22ab9", "c7f766d88cb0fd66"),
)  # fmt: skip


def read_works(directory: Path) -> list[str]:
    """Return the texts of WORKS in order.

    Raises:
        ValueError: a file's hash differs from the table's.
    """
    texts = []
    for work in WORKS:
        content = (directory / work.file).read_bytes()
        digest = sha256(content).hexdigest()
        if not digest.startswith(work.sha256_prefix):
            raise ValueError(f"{work.file}: sha256 is {digest[:16]}, the table says {work.sha256_prefix}")
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
