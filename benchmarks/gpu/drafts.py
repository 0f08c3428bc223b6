"""Stage `drafts`: speculative decoding of the 8B Llama by prompt lookup and by an EAGLE-3 head of random weights.

Random weights accept few drafted tokens, so the figures are the cost of a step with drafts, and how many were
accepted. Each step drafts, whatever it costs; a server would choose by measurement.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.draft_lengths import fixed_lengths
from benchmarks.gpu.engine import MODEL, NUM_WARM_UP, measure_rows, serving
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.random_parts import write_eagle3
from benchmarks.gpu.record import Record
from benchmarks.gpu.server import GREEDY, Server
from benchmarks.gpu.sizes import Sizes

# Load, record graphs, measure.
METHOD_S = 25.0
# Tokens of the prompts, as many as they are long. Outputs have no others, so that prompt lookup finds each of them.
PROMPT_TOKENS = range(1, 65)


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model, head = work / MODEL, work / "eagle3"
    write_llama(model, sizes.model, sizes.dtype, sizes.device)
    write_eagle3(head, sizes)
    methods: dict[str, dict[str, Any]] = {"ngram": {"prompt_lookup_min": 1}, "eagle3": {"model": str(head)}}
    with fixed_lengths(sizes.num_drafts):
        for method, settings in methods.items():
            if record.begins(method, METHOD_S):
                with record.case(method):
                    measure_method(record, model, sizes, method, settings)


def measure_method(record: Record, model: Path, sizes: Sizes, method: str, settings: dict[str, Any]) -> None:
    text = json.dumps({"method": method, "num_speculative_tokens": sizes.num_drafts, **settings})
    with serving(record, model, sizes, f"drafts_{method}", speculative_config=text) as server:
        for rows, length in (sizes.decodes[0], sizes.decodes[-3]):
            with record.case(f"{method}, {rows} rows"):
                measure_drafts(record, server, sizes, f"drafts.{method}.{rows}x{length}", rows, length)


def measure_drafts(record: Record, server: Server, sizes: Sizes, case: str, rows: int, length: int) -> None:
    prompts = [np.resize(PROMPT_TOKENS, length // 2 + index) for index in range(rows)]
    sampling = replace(GREEDY, allowed_token_ids=tuple(PROMPT_TOKENS[: length // 2]))
    num_steps = max(1, sizes.num_timed // (1 + sizes.num_drafts))
    # Enough that no row ends, if every drafted token is accepted.
    num_tokens = (1 + NUM_WARM_UP + num_steps) * (1 + sizes.num_drafts) + 1
    handles = [server.submit(prompt, num_tokens, sampling) for prompt in prompts]
    stats = server.scheduler.stats
    num_drafted, num_accepted = stats.num_draft_tokens, sum(stats.num_accepted)
    num_tokens = sum(len(server.tokens[handle]) for handle in handles)
    step_s = measure_rows(server, handles, num_steps)
    num_tokens = sum(len(server.tokens[handle]) for handle in handles) - num_tokens
    server.abort()
    num_drafted = stats.num_draft_tokens - num_drafted
    num_accepted = sum(stats.num_accepted) - num_accepted
    assert num_drafted, "no token was drafted"
    record.add(f"{case}.step_ms", 1e3 * step_s, "ms", f"{sizes.num_drafts} drafted tokens per row and step")
    record.add(f"{case}.acceptance", num_accepted / num_drafted, "", f"of {num_drafted} drafted tokens")
    record.add(f"{case}.tokens_per_row_and_step", num_tokens / (num_tokens - num_accepted), "tokens")
