"""Time that a rank waits for its scheduler between two steps, with one step in flight and with two.

    python -m benchmarks.gap --json benchmarks/results/gap.json

A rank that has sent a step's result can continue at once if the next plan has arrived. Rank 0 measures the time from
its result to the arrival of the next plan, in a cluster as it serves: a scheduler and its ranks as processes, plans
over the step channel. Idle times without requests do not count.
"""

from __future__ import annotations

import asyncio

from benchmarks.common import Figure, make_parser, report
from quire import SamplingParams
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.fleet.ray.local_cluster import LocalCluster
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.fleet.replica.launch import launch_replica
from quire.cluster.fleet.replica.replica import Replica, new_replica_id
from quire.cluster.text.requests.output_processor import OutputProcessor
from quire.cluster.text.requests.request import RequestChecker
from quire.cluster.text.requests.request_stream import output_events
from quire.cluster.text.requests.tokenizer import Tokenizer
from quire.proto.replica_status import ReplicaStatus

STATUS_TIMEOUT_S = 10.0
PROMPT_LEN = 32


async def answer_all(
    replica: Replica, tokenizer: Tokenizer, num_requests: int, num_tokens: int
) -> ReplicaStatus:
    """Run all requests at once; return the replica's status afterwards."""
    checker = RequestChecker(replica.config, tokenizer)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    client = ReplicaClient(replica.address, replica.replica_id)

    async def answer(index: int) -> None:
        request = checker.check([100 + index] * PROMPT_LEN, sampling)
        async for _ in output_events(client.submit(request), OutputProcessor(request, tokenizer)):
            pass

    client.start()
    client.fail_after(replica.failure)
    try:
        await asyncio.gather(*map(answer, range(num_requests)))
        return await client.status(STATUS_TIMEOUT_S)
    finally:
        await client.close()


def measure(
    model: str, num_ranks: int, steps_in_flight: int, num_requests: int, num_tokens: int
) -> dict[str, Figure]:
    options = EngineOptions(
        model, tensor_parallel_size=num_ranks, max_steps_in_flight=steps_in_flight, num_kv_blocks=2048
    )
    config = resolve(options, Machine.this())
    tokenizer = Tokenizer(config.model.path)
    with LocalCluster(1 + num_ranks) as cluster, launch_replica(config, new_replica_id(), cluster) as replica:
        status = asyncio.run(answer_all(replica, tokenizer, num_requests, num_tokens))
    note = f"{num_ranks} ranks, {num_requests} requests of {num_tokens} tokens, {status.num_steps} steps"
    return {f"gap.in_flight_{steps_in_flight}.wait_ms": Figure(1e3 * status.mean_plan_wait_s, "ms", note)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for steps_in_flight in (1, 2):
        figures |= measure(
            arguments.model,
            arguments.tensor_parallel_size,
            steps_in_flight,
            arguments.requests,
            arguments.tokens,
        )
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
