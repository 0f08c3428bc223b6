"""Prefix hits of models whose layers keep states, by the policy of snapshots and the split of memory.

    python -m benchmarks.state_memory [--traces DIR] [--quick] --json benchmarks/results/state_memory.json

The serving scheduler makes every decision; only the ranks are simulated, as in `benchmarks.memory`. A state takes as
much memory as the keys and values of STATE_TOKENS tokens.

- state_memory.<trace>.<blocks>.<policy>: share of prompt tokens found, in memory of that many blocks of 16 tokens.
  The policies are `served`, the one that serves (scheduler/kv/snapshot_policy.py), and `every`, a snapshot after each
  SNAPSHOT_LEN tokens, both with the split of memory that serves. `attention` is the share that blocks alone would
  give, without states. Without snapshots nothing is found. Outputs are cached, but they are random, so that no later
  prompt contains them.
- state_memory.<trace>.<blocks>.split.<factor>: as `served`, with that many times the slots, in the same memory.

`agent` is a made-up trace: NUM_SESSIONS sessions, whose prompts have 12,000 to 80,000 tokens. Of these 94 % are those
of an earlier prompt: the instructions of all sessions, the files of a project, and the turns before. The first
NUM_AGENT requests are replayed. Its lengths and those of the conversations are scaled down, as in `benchmarks.trace`,
and those of states and snapshots with them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from rich.progress import track

from benchmarks.common import Figure, report
from benchmarks.memory import NUM_QUICK, at_load, chosen_traces, make_trace_parser
from benchmarks.replay import Replay, replay
from benchmarks.trace import Trace
from quire.cluster.simulation.traces import BLOCK_TOKENS, TracedRequest
from quire.proto.state_memory import choose_num_slots
from quire.scheduler.kv import block_manager, snapshot_policy

# A state of Qwen3.5-4B takes as much memory as the keys and values of so many tokens, and vLLM 0.32 lays out its
# blocks so that a snapshot is taken after each of so many.
STATE_TOKENS, SNAPSHOT_LEN = 1_584, 528
# Sequences that run at once, each of which has a state.
NUM_ROWS = 32
NUM_SESSIONS, NUM_PROJECTS = 610, 24
# Tokens of the agent's trace: the longest prompt, the instructions, and the range of a project's files.
LONGEST, INSTRUCTIONS, FILES = 80_000, 9_000, (3_000, 40_000)
# Of which one of the trace as it is replayed stands for so many.
AGENT_SCALE = 8
# Blocks of memory as it would be without scaling, and the factors of wrong splits.
POOL_BLOCKS, AGENT_BLOCKS = (16_000, 64_000), (64_000, 256_000)
FACTORS = (0.25, 0.5, 2.0)
# Trace |-> tokens for each of which one is replayed.
SCALES = {"agent": AGENT_SCALE, "mooncake_conversation": 32, "coding_multiturn": 1, "websearch_multiturn": 1}
NUM_BUNDLED, NUM_AGENT = 150, 900

Figures = dict[str, Figure]


def make_agent_trace(seed: int = 0) -> Trace:
    """Return the trace of agents: sessions that overlap, in order of arrival."""
    rng, numbers = random.Random(seed), itertools.count(1)

    def blocks(num_tokens: float) -> tuple[int, ...]:
        return tuple(itertools.islice(numbers, max(1, round(num_tokens / AGENT_SCALE / BLOCK_TOKENS))))

    instructions = blocks(INSTRUCTIONS)
    least, most = FILES
    projects = [
        instructions + blocks(least + (most - least) * project / NUM_PROJECTS)
        for project in range(NUM_PROJECTS)
    ]
    turns = list[tuple[float, tuple[int, ...], int]]()
    for _ in range(NUM_SESSIONS):
        time_s, prompt = rng.uniform(0, 1000), rng.choice(projects)
        for _ in range(rng.randint(2, 10)):
            prompt += blocks(len(prompt) * BLOCK_TOKENS * AGENT_SCALE * rng.uniform(0.03, 0.095))
            if len(prompt) * BLOCK_TOKENS * AGENT_SCALE > LONGEST:
                break
            turns.append((time_s, prompt, rng.randint(100, 1_500) // AGENT_SCALE))
            time_s += rng.expovariate(1 / 12.0)
    turns.sort()
    requests = (
        TracedRequest(number, time_s, len(prompt) * BLOCK_TOKENS, num_output, prompt)
        for number, (time_s, prompt, num_output) in enumerate(turns)
    )
    return Trace("agent", tuple(requests))


def seen_before(trace: Trace) -> float:
    """Return the share of prompt blocks that an earlier prompt had."""
    seen, count, total = set[int](), 0, 0
    for request in trace.requests:
        count += sum(block in seen for block in request.block_hashes)
        total += len(request.block_hashes)
        seen.update(request.block_hashes)
    return count / total


def every(snapshot_len: int) -> Callable[..., tuple[int, ...]]:
    """Return a function like snapshot_ends, of a policy that saves after each `snapshot_len` tokens."""

    def ends(
        num_cached_tokens: int, num_shared_blocks: int, num_tokens: int, block_size: int, *, is_reused: bool
    ) -> tuple[int, ...]:
        return tuple(end for end in range(snapshot_len, num_tokens, snapshot_len) if end > num_cached_tokens)

    return ends


@contextmanager
def scaled_policy(scale: int) -> Iterator[None]:
    """Let the least prefix with a snapshot be as short as in a trace that is not scaled down, or one block."""
    least = max(1, snapshot_policy.MIN_SNAPSHOT_BLOCKS // scale)
    with ExitStack() as stack:
        for module in (snapshot_policy, block_manager):
            stack.enter_context(patch.object(module, "MIN_SNAPSHOT_BLOCKS", least))
        yield


def measure(trace: Trace, num_blocks: int) -> Figures:
    """Return the figures of a trace in memory of `num_blocks` blocks before it is scaled down."""
    with scaled_policy(SCALES[trace.name]):
        return _measure(trace, num_blocks)


def _measure(trace: Trace, num_blocks: int) -> Figures:
    name, scale = f"state_memory.{trace.name}.{num_blocks // 1000}k", SCALES[trace.name]
    share, total = f"{100 * seen_before(trace):.0f} % of the prompts seen before", num_blocks // scale
    state_blocks = max(1, round(STATE_TOKENS / scale / BLOCK_TOKENS))
    snapshot_len = max(1, round(SNAPSHOT_LEN / scale / BLOCK_TOKENS)) * BLOCK_TOKENS
    num_slots = choose_num_slots(trace.name, NUM_ROWS, state_blocks, 1 << 40, total)
    trace = at_load(trace)

    def run(slots: int) -> tuple[Replay, str]:
        num_left = total - slots * state_blocks
        done = replay(trace, num_left, NUM_ROWS, slots)
        return (
            done,
            f"{slots - 1} slots beside {num_left * scale} blocks, {len(done.requests)} requests, {share}",
        )

    runs = {"served": run(num_slots), "attention": (replay(trace, total, NUM_ROWS), "blocks alone")}
    with patch.object(block_manager, "snapshot_ends", every(snapshot_len)):
        runs["every"] = run(num_slots)
    for factor in FACTORS:
        slots = max(3, round(num_slots * factor))
        if total - slots * state_blocks > 2 * trace.max_tokens // BLOCK_TOKENS:
            runs[f"split.{factor:g}"] = run(slots)
    return {
        f"{name}.{policy}": Figure(100 * each.hit_rate, "%", note) for policy, (each, note) in runs.items()
    }


def main() -> None:
    arguments = make_trace_parser(__doc__).parse_args()
    recorded = [trace for trace in chosen_traces(arguments, NUM_BUNDLED) if trace.name in SCALES]
    agent = make_agent_trace().first(NUM_QUICK if arguments.quick else NUM_AGENT)
    figures: Figures = {}
    jobs = [(trace, num_blocks) for trace in recorded for num_blocks in POOL_BLOCKS]
    jobs += [(agent, num_blocks) for num_blocks in AGENT_BLOCKS]
    for trace, num_blocks in track(jobs, "replaying", transient=True):
        figures |= measure(trace, num_blocks)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
