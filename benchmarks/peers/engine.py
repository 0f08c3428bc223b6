"""Main loop inside a measured engine: reads requests as lines of JSON from stdin, writes times to stdout.

It runs in each engine's environment, so it uses only the standard library. The engine's own output goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

Requests = list[tuple[list[int], int]]  # prompt token ids and the number of output tokens
# Requests |-> the lengths of the outputs, decoded greedily with end-of-text tokens ignored.
Generate = Callable[[Requests], list[int]]


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_args()


def serve(load: Callable[[], Generate]) -> None:
    """Load the engine, then serve batches of requests until stdin ends."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    generate = load()
    _write(results, load_s=time.perf_counter() - started)
    for text in sys.stdin:
        requests: Requests = [(ids, length) for ids, length in json.loads(text)]
        started, used = time.perf_counter(), time.process_time()
        lengths = generate(requests)
        seconds, processor_s = time.perf_counter() - started, time.process_time() - used
        if lengths != [length for _, length in requests]:
            expected = [length for _, length in requests]
            raise RuntimeError(f"the outputs have {lengths} tokens, must have {expected}")
        _write(results, seconds=seconds, processor_s=processor_s)


def _write(results: TextIO, **fields: float) -> None:
    print(json.dumps(fields), file=results, flush=True)
