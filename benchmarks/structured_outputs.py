"""Structured outputs: schemas that are supported, time to compile, and cost per token.

    python -m benchmarks.structured_outputs --json FILE [--schemas JSONL ...]

The cost per token is that of one mask and one accepted token, and that of a decode step of the demo model at batch 64
with a constraint on every row, beside the same step without. Both ways alternate: other processes share the machine.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figure, make_parser, report
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.worker.structured.compilation import AUTO, GUIDANCE, XGRAMMAR, GrammarLibrary
from quire.worker.structured.grammar import GrammarBackend, GrammarSpec, UnsupportedConstraint, num_words
from quire.worker.structured.guidance_backend import GuidanceBackend
from quire.worker.structured.vocabulary import Vocabulary
from quire.worker.structured.xgrammar_backend import XGrammarBackend

SCHEMAS = Path(__file__).parents[1] / "tests" / "worker" / "structured" / "schemas"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ishmael of the Pequod", "age": 27, "tags": ["red", "blue", "green", "red"]}'
BATCH, NUM_TOKENS, ROUNDS = 64, 48, 5


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--schemas", type=Path, nargs="*", help="files of schemas, one JSON object per line")
    given = parser.parse_args()
    library = GrammarLibrary(str(DEMO_MODEL_PATH), 3072, (0,))
    figures: dict[str, float] = {}
    for file in given.schemas or sorted(SCHEMAS.glob("*.jsonl")):
        for backend in (XGRAMMAR, GUIDANCE, AUTO):
            figures |= measure_schemas(library, file, backend)
    for vocab_size in (3072, 131072):
        for backend in (XGRAMMAR, GUIDANCE):
            figures |= measure_matching(vocabulary_of(library.vocabulary, vocab_size), backend)
    for backend in (XGRAMMAR, GUIDANCE):
        figures |= measure_step(backend)
    report({name: Figure(value, _unit_of(name)) for name, value in figures.items()}, given.json)


# End of a figure's name, or of it without a percentile |-> its unit.
_UNITS = {
    "_ms": "ms",
    "_us": "us",
    "_kb": "kB",
    ".schemas": "schemas",
    ".supported": "share",
    "_share": "share",
}


def _unit_of(name: str) -> str:
    stem = re.sub("_(p50|p99|mean)$", "", name)
    return next(unit for end, unit in _UNITS.items() if stem.endswith(end))


def read_schemas(file: Path) -> Iterator[Any]:
    raw = file.read_bytes()
    for line in (gzip.decompress(raw) if file.suffix == ".gz" else raw).splitlines():
        yield json.loads(line)["schema"]


def measure_schemas(library: GrammarLibrary, file: Path, backend: str) -> dict[str, float]:
    """Return the share of schemas that are supported, and the time and size of their grammars."""
    times, sizes, reasons, num_schemas = [], [], Counter[str](), 0
    library.prepare(backend)
    for schema in read_schemas(file):
        num_schemas += 1
        started = time.perf_counter()
        try:
            sizes.append(len(library.compile(GrammarSpec("json", json.dumps(schema)), backend)))
        except UnsupportedConstraint as error:
            reasons[str(error)] += 1
        times.append(time.perf_counter() - started)
    name = f"structured.{file.name.split('.')[0]}.{backend}"
    return {
        f"{name}.schemas": num_schemas,
        f"{name}.supported": len(sizes) / num_schemas,
        f"{name}.compile_ms_p50": 1e3 * float(np.percentile(times, 50)),
        f"{name}.compile_ms_p99": 1e3 * float(np.percentile(times, 99)),
        f"{name}.grammar_kb_p50": float(np.percentile(sizes, 50)) / 1e3,
    }


def vocabulary_of(known: Vocabulary, size: int) -> Vocabulary:
    """Return the demo model's vocabulary, extended by random words to `size` tokens."""
    rng, pieces = random.Random(0), list(known.pieces)
    taken = set(pieces)
    while len(pieces) < size:
        letters = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(3, 10)))
        piece = (rng.choice(["", " "]) + letters).encode()
        if piece not in taken:
            taken.add(piece)
            pieces.append(piece)
    return Vocabulary(pieces, known.special_ids, known.stop_ids, known.encode)


def measure_matching(vocabulary: Vocabulary, backend: str) -> dict[str, float]:
    """Return the times to compile and load a schema, and to advance by a token and make a mask."""
    # Not a GrammarLibrary, which refuses grammars as large as xgrammar's.
    library: GrammarBackend = (XGrammarBackend if backend == XGRAMMAR else GuidanceBackend)(vocabulary)
    started = time.perf_counter()
    compiled = library.compile(GrammarSpec("json", json.dumps(PERSON)))
    compile_s = time.perf_counter() - started
    started = time.perf_counter()
    grammar = library.load(compiled)
    load_s = time.perf_counter() - started
    words = np.zeros(num_words(len(vocabulary)), dtype=np.int32)
    masks, accepts = [], []
    for _ in range(20):
        matcher = grammar.new_matcher()
        for token_id in vocabulary.encode(TEXT):
            started = time.perf_counter()
            matcher.fill_mask(words)
            masked = time.perf_counter()
            assert matcher.accept(token_id)
            accepts.append(time.perf_counter() - masked)
            masks.append(masked - started)
    name = f"structured.matching.{backend}.v{len(vocabulary)}"
    return {
        f"{name}.compile_ms": 1e3 * compile_s,
        f"{name}.load_ms": 1e3 * load_s,
        f"{name}.compiled_kb": len(compiled) / 1e3,
        f"{name}.mask_us_p50": 1e6 * statistics.median(masks),
        f"{name}.mask_us_p99": 1e6 * float(np.percentile(masks, 99)),
        f"{name}.mask_us_mean": 1e6 * statistics.mean(masks),
        f"{name}.accept_us_p50": 1e6 * statistics.median(accepts),
    }


def measure_step(backend: str) -> dict[str, float]:
    """Return the time of a decode step of the demo model at batch 64, with and without constraints."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    # A long string: every step has a mask that allows many tokens.
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    form = StructuredOutputsParams(json=schema | {"additionalProperties": False}, disable_any_whitespace=True)
    plain, constrained = SamplingParams(**settings), SamplingParams(structured_outputs=form, **settings)
    prompts = [[5 + index] * 8 for index in range(BATCH)]
    times: dict[str, list[float]] = {"plain": [], "constrained": []}
    with LLM("demo", device="cpu", max_num_seqs=BATCH, structured_outputs_backend=backend) as llm:
        for _ in range(1 + ROUNDS):
            for name, params in (("plain", plain), ("constrained", constrained)):
                started = time.perf_counter()
                llm.generate(prompts, params)
                times[name].append((time.perf_counter() - started) / NUM_TOKENS)
    plain_s, constrained_s = (statistics.median(times[name][1:]) for name in times)
    return {
        f"structured.step.{backend}.plain_ms": 1e3 * plain_s,
        f"structured.step.{backend}.constrained_ms": 1e3 * constrained_s,
        f"structured.step.{backend}.added_share": constrained_s / plain_s - 1,
    }


if __name__ == "__main__":
    main()
