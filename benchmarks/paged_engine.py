"""Blocks shared by outputs and beams, and preemption by block size, on a real engine (after Kwon et al., SOSP 2023).

    python -m benchmarks.paged_engine --json benchmarks/results/paged_engine.json

An engine in this process, whose scheduler and rank are those that serve.

- ``sharing.<lengths>.<kind>.<number>.saved``: of the demo model, the share of the blocks in all tables that need no
  memory, since the tables of one request have them together: by its ``outputs`` (n) and by the width of its
  ``beams``. Prompts and outputs are as long as the mean ones of the paper's Alpaca and ShareGPT traces, with texts of
  docs/ as prompts;
- ``preemption.<tokens>.<policy>_tokens_per_s``: of a model of 60 million parameters in half of the memory that its
  sequences need, by the tokens of a block: the KV of preempted sequences is computed again (``recompute``), or copied
  to host memory and back (``swap``). ``plenty`` has all the memory. In wall time: nothing else should run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.random_models import TOKENIZER_LEN, make_model
from quire.cluster.config.engine_options import DEMO_MODEL, EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.offline.in_process import load_in_process
from quire.cluster.text.requests.tokenizer import load_tokenizer
from quire.proto.block_tables import IntArray
from quire.proto.config import EngineConfig
from quire.proto.sampling import SamplingParams
from quire.proto.stream import ReplicaMessage, Submit, TokenBatch
from quire.scheduler import InMemoryMailbox, Scheduler, StepLoop, WorkerGroup

DOCS = Path(__file__).parents[1] / "docs"
GATEWAY = b"benchmark"
# Name |-> mean tokens of a prompt and of an output.
LENGTHS = {"alpaca": (19, 58), "sharegpt": (161, 338)}
COUNTS = (2, 4, 6)
NUM_SHARING = 8
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
NUM_PREEMPTED, PREEMPTED_PROMPT, PREEMPTED_OUTPUT = 12, 200, 100
# So that the cost model always prefers it.
SWAPS_AT_ANY_COST = 1e12


class Usage:
    """A run of requests, all submitted at once, and the memory of its steps."""

    def __init__(self, config: EngineConfig, ranks: WorkerGroup) -> None:
        ranks.rebuild(1)  # empties the rows that an earlier scheduler left
        self._mailbox = InMemoryMailbox()
        self._mailbox.connect(GATEWAY, self._on_message)
        self.scheduler = Scheduler(config)
        self._loop = StepLoop(self.scheduler, ranks, self._mailbox, "benchmark")
        self.num_held = self.num_entries = self._num_ended = 0

    def _on_message(self, message: ReplicaMessage) -> None:
        assert isinstance(message, TokenBatch)
        self._num_ended += len(message.finished)
        assert not any(each.error for each in message.finished), message.finished

    def run(self, prompts: Sequence[IntArray], params: SamplingParams) -> float:
        """Serve the prompts; return the seconds."""
        width, blocks = params.num_sequences, self.scheduler.blocks
        for number, prompt in enumerate(prompts):
            self._mailbox.post(GATEWAY, Submit(number * width, f"request-{number}", prompt, sampling=params))
        began_at = time.perf_counter()
        while self._num_ended < len(prompts) * width:
            self._loop.turn()
            self.num_held += blocks.num_held_blocks
            self.num_entries += int(blocks.tables.lens.sum())
        return time.perf_counter() - began_at


def sharing() -> dict[str, Figure]:
    """Return the blocks that the outputs and beams of a request share."""
    options = EngineOptions(DEMO_MODEL, max_num_seqs=NUM_SHARING * max(COUNTS), num_kv_blocks=4096)
    config, ranks = load_in_process(resolve(options, Machine.this()))
    text = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))[:200_000]
    tokens = np.array(load_tokenizer(config.model).encode(text, add_special_tokens=False), np.int32)
    figures = {}
    for name, (num_prompt, num_output) in LENGTHS.items():
        starts = np.linspace(0, tokens.size - num_prompt, NUM_SHARING).astype(int)
        prompts = [tokens[start : start + num_prompt] for start in starts]
        for count in COUNTS:
            kinds = {
                "outputs": SamplingParams(n=count, seed=0, max_tokens=num_output, ignore_eos=True),
                "beams": SamplingParams(
                    n=count, beam_width=count, seed=0, max_tokens=num_output, ignore_eos=True
                ),
            }
            for kind, params in kinds.items():
                usage = Usage(config, ranks)
                usage.run(prompts, params)
                saved = 1 - usage.num_held / usage.num_entries
                note = f"{NUM_SHARING} requests, prompts of {num_prompt} tokens, outputs of {num_output}"
                figures[f"sharing.{name}.{kind}.{count}.saved"] = Figure(100 * saved, "%", note)
    ranks.close()
    return figures


def preemption(repeats: int) -> dict[str, Figure]:
    """Return the throughput with preemptions, by block size and policy."""
    figures: dict[str, Figure] = {}
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=PREEMPTED_OUTPUT, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), "s")
        for block_size in BLOCK_SIZES:
            needed = NUM_PREEMPTED * -(-(PREEMPTED_PROMPT + PREEMPTED_OUTPUT) // block_size)
            options = EngineOptions(
                folder, dtype="float32", block_size=block_size, num_kv_blocks=needed + 1,
                num_host_kv_blocks=2 * needed, max_num_seqs=NUM_PREEMPTED, prefix_caching=False,
            )  # fmt: skip
            config, ranks = load_in_process(resolve(options, Machine.this()))
            scarce = replace(config.cache, num_kv_blocks=needed // 2 + 1)
            caches = {
                "plenty": config.cache,
                "recompute": replace(scarce, num_host_kv_blocks=0),
                "swap": replace(scarce, swap_blocks_per_s=SWAPS_AT_ANY_COST),
            }
            rates: dict[str, list[float]] = {policy: [] for policy in caches}
            notes = {}
            for _ in range(repeats):
                prompts = [
                    rng.integers(300, TOKENIZER_LEN, PREEMPTED_PROMPT).astype(np.int32)
                    for _ in range(NUM_PREEMPTED)
                ]
                for policy, cache in caches.items():
                    usage = Usage(replace(config, cache=cache), ranks)
                    seconds = usage.run(prompts, params)
                    rates[policy].append(NUM_PREEMPTED * PREEMPTED_OUTPUT / seconds)
                    swapped = usage.scheduler.blocks.num_swapped_blocks
                    notes[policy] = (
                        f"{usage.scheduler.stats.num_preemptions} preemptions, {swapped} blocks copied"
                    )
            ranks.close()
            figures |= {
                f"preemption.{block_size}.{policy}_tokens_per_s": Figure(
                    median(rates[policy]), "tokens/s", notes[policy]
                )
                for policy in caches
            }
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of each preemption (default: %(default)s)")
    arguments = parser.parse_args()
    report(sharing() | preemption(arguments.repeats), arguments.json)


if __name__ == "__main__":
    main()
