"""Paged against contiguous memory, and sharing of prefixes, in simulated time (after Kwon et al., SOSP 2023).

    python -m benchmarks.paged_attention [--requests N] --json benchmarks/results/paged_attention.json

The scheduler and block manager are those that serve; a replica is a Llama of 8 billion parameters on an NVIDIA H100.
Every run is the same on every machine.

- ``paged.<tokens>``: azure_conv_2023, faster than can be served, in the same memory, by the tokens of a block. With
  blocks as long as the longest sequence, admission is that of contiguous memory: each sequence reserves all that it
  may ever need. ``waste`` is the share of the held memory without a token, ``running`` the mean number of sequences
  that run at once, ``requests_per_s`` the throughput;
- ``sharing.<trace>``: the memory that prefixes in common save, of traces with conversations: ``held`` are the blocks
  of a running sequence without and with the prefix cache, ``saved`` is the share that sharing saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.autoscale import TRACES
from benchmarks.common import Figure, make_parser, report
from benchmarks.memory import BUNDLED, NUM_BUNDLED, at_load
from benchmarks.replay import NO_LIMIT, Ended, ReplicaModel
from benchmarks.trace import Trace, read_trace, read_traces
from quire.cluster.simulation.fleet import SimulatedFleet
from quire.cluster.simulation.replica import SimulatedReplica
from quire.proto.config import EngineConfig

NAME = "azure_conv_2023"
SPEED = 10.0
BLOCK_SIZES = (16, 64, 256, 1024, 8192)
POOL_TOKENS = 131_072
# Of the traces with prefixes in common: all blocks that they need.
SHARING_BLOCKS = 64_000


@dataclass(slots=True)
class Memory:
    """Memory that a run held: sums over its steps, weighted with their seconds."""

    seconds: float = 0.0
    running: float = 0.0
    used_tokens: float = 0.0
    held_blocks: float = 0.0

    def count(self, replica: SimulatedReplica, seconds: float) -> None:
        """Count a step."""
        scheduler = replica.scheduler
        self.seconds += seconds
        self.running += seconds * scheduler.num_running
        self.used_tokens += seconds * scheduler.num_used_tokens
        self.held_blocks += seconds * scheduler.blocks.num_held_blocks


def serve(config: EngineConfig, model: ReplicaModel, trace: Trace) -> tuple[Memory, float]:
    """Serve a trace on one replica; return what it held, and its requests per second."""
    memory, ended = Memory(), Ended()
    fitting = [each for each in trace.requests if each.num_tokens <= config.max_servable_tokens]
    cost = SimulatedFleet(config, model.step_time, ended, on_elapsed=memory.count).run(fitting)
    return memory, len(ended.requests) / cost.end_s


def paging(trace: Trace) -> dict[str, Figure]:
    """Return waste, sequences at once and throughput by the size of blocks."""
    model = ReplicaModel(max_num_seqs=256, max_queue_len=NO_LIMIT, prefix_caching=False)
    config, figures = model.config(), dict[str, Figure]()
    for block_size in BLOCK_SIZES:
        cache = replace(config.cache, block_size=block_size, num_kv_blocks=POOL_TOKENS // block_size + 1)
        memory, rate = serve(replace(config, cache=cache), model, trace)
        waste = 1 - memory.used_tokens / (block_size * memory.held_blocks)
        remark = f"{len(trace.requests)} requests, {POOL_TOKENS} tokens of memory"
        figures |= {
            f"paged.{block_size}.waste": Figure(100 * waste, "%", remark),
            f"paged.{block_size}.running": Figure(memory.running / memory.seconds, "sequences", remark),
            f"paged.{block_size}.requests_per_s": Figure(rate, "1/s", remark),
        }
    return figures


def sharing(trace: Trace) -> dict[str, Figure]:
    """Return the blocks of a running sequence with and without the prefix cache."""
    held = {}
    for caches in (False, True):
        model = ReplicaModel(
            num_blocks=SHARING_BLOCKS,
            max_num_seqs=256,
            max_model_len=trace.max_tokens,
            max_queue_len=NO_LIMIT,
            prefix_caching=caches,
        )
        memory, _ = serve(model.config(), model, at_load(trace))
        held[caches] = memory.held_blocks / memory.running
    remark, name = f"{len(trace.requests)} requests", f"sharing.{trace.name}"
    return {
        f"{name}.held.alone": Figure(held[False], "blocks", remark),
        f"{name}.held.shared": Figure(held[True], "blocks", remark),
        f"{name}.saved": Figure(100 * (1 - held[True] / held[False]), "%", remark),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--requests", type=int, default=NUM_BUNDLED, help="of each trace (default: %(default)s)"
    )
    arguments = parser.parse_args()
    trace = read_trace(TRACES / f"{NAME}.csv.gz").first(arguments.requests)
    figures = paging(trace.over(trace.requests[-1].arrival_s / SPEED))
    for each in read_traces(BUNDLED):
        if each.shares_prefixes:
            figures |= sharing(each.first(arguments.requests))
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
