"""The inside of a measured engine: requests come as lines of JSON on stdin, seconds go back on stdout.

Runs in every engine's own environment, so it needs nothing but Python. What an engine prints itself goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

Requests = list[tuple[list[int], int]]  # prompt ids and the length of the answer
Generate = Callable[[Requests], list[int]]  # the lengths of the answers, greedy and with ends ignored


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_args()


def serve(load: Callable[[], Generate]) -> None:
    """Loads the engine and answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    generate = load()
    _tell(answers, load_s=time.perf_counter() - started)
    for text in sys.stdin:
        requests: Requests = [(ids, length) for ids, length in json.loads(text)]
        started = time.perf_counter()
        lengths = generate(requests)
        seconds = time.perf_counter() - started
        if lengths != [length for _, length in requests]:
            raise RuntimeError(f"answers of {lengths} tokens")
        _tell(answers, seconds=seconds)


def _tell(answers: TextIO, **fields: float) -> None:
    print(json.dumps(fields), file=answers, flush=True)
