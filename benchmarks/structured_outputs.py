"""Structured outputs: schemas that are supported, time to compile, and cost per token.

    python -m benchmarks.structured_outputs --json FILE [--schemas JSONL ...]

The cost per token is that of one mask and one accepted token, and that of a decode step of a rank at batch 64 with a
constraint on every row, beside the same step without. Both ways alternate step by step, since other processes share
the machine. `added_ms` is the median of the pairs' differences. The steps are those of the demo model (vocabulary of
3,072) and of the model `s` of benchmarks.random_models (60 million parameters, vocabulary of 32,000).
"""

from __future__ import annotations

import gzip
import json
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figure, make_parser, report
from benchmarks.random_models import make_model
from quire.cluster.config.engine_options import DEMO_MODEL_PATH, EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.block_tables import BlockTables
from quire.proto.config import EngineConfig
from quire.proto.step import NewSequence, RowSampling, StepPlan
from quire.proto.structured_outputs import OutputConstraint
from quire.worker.comm.communicator import SingleRank
from quire.worker.rank.runner import ModelRunner
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
# Strings without an end: nearly all masks are those within a string, which allow many tokens.
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 64}
BATCH, PROMPT_LEN, MAX_LEN, BLOCK_SIZE = 64, 8, 256, 16
NUM_WARM_UP = 4  # pairs of steps that are not measured
# Model |-> pairs of steps; the names are those of the figures, as `demo` and MODELS of benchmarks.random_models.
NUM_PAIRS = {"demo": 200, "s": 60}


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
    with tempfile.TemporaryDirectory(prefix="quire-structured-") as folder:
        make_model(Path(folder), "s")
        for name, path in (("demo", str(DEMO_MODEL_PATH)), ("s", folder)):
            figures |= measure_steps(name, path)
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


def measure_steps(name: str, path: str) -> dict[str, float]:
    """Return what constraints on all rows add to a decode step of a model, for both backends."""
    figures: dict[str, float] = {}
    for backend in (XGRAMMAR, GUIDANCE):
        config = step_config(path)
        library = GrammarLibrary(path, config.model.vocab_size, config.model.eos_token_ids)
        grammar = library.compile(
            GrammarSpec("json", json.dumps(TEXTS), disable_any_whitespace=True), backend
        )
        plain, constrained = step_times(config, grammar, NUM_PAIRS[name])
        plain_s, constrained_s = statistics.median(plain), statistics.median(constrained)
        pairs = zip(constrained, plain, strict=True)
        added_s = statistics.median(with_form - without for with_form, without in pairs)
        figures |= {
            f"structured.step.{name}.{backend}.plain_ms": 1e3 * plain_s,
            f"structured.step.{name}.{backend}.constrained_ms": 1e3 * constrained_s,
            f"structured.step.{name}.{backend}.added_ms": 1e3 * added_s,
            f"structured.step.{name}.{backend}.added_share": added_s / plain_s,
        }
    return figures


def step_config(path: str) -> EngineConfig:
    """Return the configuration of one rank with 2 * BATCH rows."""
    config = resolve(
        EngineOptions(
            path, device="cpu", max_num_seqs=2 * BATCH, max_model_len=MAX_LEN, block_size=BLOCK_SIZE
        ),
        Machine.this(),
    )
    # The random model has no token that ends an output, and a grammar needs one.
    eos = config.model.eos_token_ids or (config.model.vocab_size - 1,)
    return replace(config, model=replace(config.model, eos_token_ids=eos))


def step_times(config: EngineConfig, grammar: bytes, num_pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of decode steps of BATCH rows without and with a constraint on each.

    One rank holds both kinds of rows and computes them in turns, since other processes share the machine.
    """
    runner = ModelRunner(config, SingleRank())
    tables, rows = BlockTables(2 * BATCH, config.max_blocks_per_seq), np.arange(2 * BATCH, dtype=np.int32)
    blocks = 1 + np.arange(rows.size * MAX_LEN // BLOCK_SIZE, dtype=np.int32).reshape(rows.size, -1)
    runner.allocate_cache(1 + blocks.size)
    new = []
    for row in range(rows.size):
        tables.put(row, blocks[row])
        constraint = OutputConstraint(PROMPT_LEN, grammar) if row >= BATCH else None
        prompt = np.full(PROMPT_LEN, 5 + row, np.int32)
        new.append(
            NewSequence(row, row, prompt, 0, blocks[row], RowSampling(seed=row, constraint=constraint))
        )
    chunk_lens = np.full_like(rows, PROMPT_LEN)
    runner.execute(StepPlan(1, 1, tables.digest, new=tuple(new), chunk_rows=rows, chunk_lens=chunk_lens))
    held = rows[BATCH:], rows[:BATCH]
    times: tuple[list[float], list[float]] = [], []
    for step in range(2 * (NUM_WARM_UP + num_pairs)):
        plan = StepPlan(2 + step, 1, tables.digest, held_rows=held[step % 2])
        started = time.perf_counter()
        runner.execute(plan)
        times[step % 2].append(time.perf_counter() - started)
    runner.close()
    return times[0][NUM_WARM_UP:], times[1][NUM_WARM_UP:]


if __name__ == "__main__":
    main()
