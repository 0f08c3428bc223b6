"""Chunked prefill and scaling with replicas and ranks, in simulated time.

    python -m benchmarks.simulated_figures [--requests N] --json FILE

The scheduler, router and prefix cache are those that serve; a replica is a Llama of 8 billion parameters on an NVIDIA
H100, whose steps take the time of their arithmetic and memory traffic. Every run is the same on every machine.

- ``chunk.<tokens>``: azure_conv_2023 at CHUNK_SPEED times its recorded speed on one replica, by the tokens that a
  step may compute. With the largest, whole prompts are computed in one step, and all other streams wait for it: the
  p99 of the time between tokens is that of the longest prompts. With the smallest, prompts do not keep up.
- ``replicas.<number>``: the same trace at REPLICA_SPEED times its recorded speed for each replica, and as many times
  the requests, so that each has the same load for the same time.
- ``ranks.<number>``: the whole trace at once on one replica of so many ranks, with two all-reduces per layer over
  NVLink, as its data sheet has it.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.autoscale import TRACES
from benchmarks.common import Figure, make_parser, report
from benchmarks.replay import NO_LIMIT, ReplicaModel
from benchmarks.trace import Trace, read_trace
from quire.cluster.simulation.fleet import FleetCost, SimulatedFleet
from quire.cluster.simulation.run import Summary

NAME = "azure_conv_2023"
CHUNKS = (128, 256, 512, 1024, 2048, 8192)
CHUNK_SPEED = 3.0
NUM_REPLICAS = (1, 2, 4, 8)
REPLICA_SPEED = 2.0
NUM_RANKS = (1, 2, 4, 8)
NVLINK_BYTES_PER_S = 450e9
# Of a Llama of 8 billion parameters, for each token.
ALL_REDUCES, ALL_REDUCE_BYTES = 64, 2 * 2 * 4096


def serve(trace: Trace, model: ReplicaModel, num_replicas: int = 1) -> tuple[Summary, FleetCost]:
    """Serve a trace on a fixed fleet."""
    summary = Summary()
    fleet = SimulatedFleet(model.config(), model.step_time, summary, num_replicas=num_replicas)
    cost = fleet.run(trace.requests)
    assert not summary.errors, f"requests failed: {summary.errors}"
    return summary, cost


def latencies(name: str, summary: Summary, remark: str) -> dict[str, Figure]:
    """Return the quantiles of the times to the first token and between tokens, in milliseconds."""
    return {
        f"{name}.{latency}_ms.{column}": Figure(1e3 * distribution.quantile(share), "ms", remark)
        for latency, distribution in (("ttft", summary.ttft), ("itl", summary.itl))
        for column, share in (("p50", 0.5), ("p99", 0.99))
    }


def chunk_figures(trace: Trace, model: ReplicaModel) -> dict[str, Figure]:
    faster = trace.over(trace.requests[-1].arrival_s / CHUNK_SPEED)
    figures: dict[str, Figure] = {}
    for chunk in CHUNKS:
        summary, cost = serve(faster, replace(model, max_num_batched_tokens=chunk))
        rate = summary.num_output_tokens / cost.end_s
        figures |= latencies(f"chunk.{chunk}", summary, f"{rate:.0f} output tokens/s")
    return figures


def replica_figures(trace: Trace, model: ReplicaModel) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for number in NUM_REPLICAS:
        part = trace.first(len(trace.requests) * number // NUM_REPLICAS[-1])
        faster = part.over(part.requests[-1].arrival_s / (REPLICA_SPEED * number))
        summary, cost = serve(faster, model, number)
        rate = summary.num_output_tokens / cost.end_s / number
        name = f"replicas.{number}"
        figures |= {
            f"{name}.output_tokens_per_s_of_each": Figure(rate, "tokens/s"),
            **latencies(name, summary, ""),
        }
    return figures


def rank_figures(trace: Trace, model: ReplicaModel) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    at_once = trace.over(0.001)
    for number in NUM_RANKS:
        cost = model.step_time.cost
        of_rank = replace(
            cost,
            weight_bytes=cost.weight_bytes / number,
            flops_per_token=cost.flops_per_token / number,
            kv_bytes_per_token=cost.kv_bytes_per_token / number,
            num_all_reduces=ALL_REDUCES if number > 1 else 0,
            all_reduce_bytes_per_token=ALL_REDUCE_BYTES * (number - 1) / number,
        )
        device = replace(model.step_time.device, link_bytes_per_s=NVLINK_BYTES_PER_S)
        step_time = replace(model.step_time, cost=of_rank, device=device)
        summary, fleet_cost = serve(at_once, replace(model, step_time=step_time))
        rate = summary.num_output_tokens / fleet_cost.end_s
        figures[f"ranks.{number}.output_tokens_per_s"] = Figure(rate, "tokens/s")
        figures[f"ranks.{number}.itl_ms.p50"] = Figure(1e3 * summary.itl.quantile(0.5), "ms")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=600, help="for each replica (default: %(default)s)")
    arguments = parser.parse_args()
    trace = read_trace(TRACES / f"{NAME}.csv.gz")
    count = arguments.requests
    model = ReplicaModel(max_num_seqs=256, max_queue_len=NO_LIMIT, prefix_caching=False)
    figures = chunk_figures(trace.first(count), model)
    figures |= replica_figures(trace.first(count * NUM_REPLICAS[-1]), model)
    figures |= rank_figures(trace.first(count), model)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
