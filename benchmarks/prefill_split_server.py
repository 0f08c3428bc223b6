"""Gaps between tokens under long prompts: two replicas of two roles, and two equal ones, on the same machine.

    python -m benchmarks.prefill_split_server --address HOST:PORT --json benchmarks/results/prefill_split_server.json

The address is that of a Ray cluster on this machine, with at least 8 CPUs. A random model of 60 million parameters,
one thread per replica. Four clients stream short prompts one after the other, while another one sends prompts of
1,500 tokens, each once, three seconds after the end of the last. The gaps are those of the four clients, as they see
them. The load comes from this process, on the same two cores as the servers.

Figures, of `equal` and of `roles`: ``split_server.<way>.gap.p50``, ``.p99`` and ``.p999``; ``.gap.longest``;
``.long.first_token``, mean of the long prompts; ``.tokens``, of the four clients per second; ``.pulled``, sequences
that brought their KV.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import Figure, make_parser, report
from benchmarks.random_models import TOKENIZER_LEN, make_model
from quire import Client, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess

NUM_STREAMS, NUM_OUTPUT_TOKENS = 4, 150
LONG_PROMPT_LEN, LONG_INTERVAL_S = 1500, 3.0
WARM_UP_S = 10.0
READY_TIMEOUT_S = 300.0
COMMON = "--num-kv-blocks", "2000", "--max-num-batched-tokens", "512", "--max-model-len", "2048"
WAYS = {
    "equal": ("--min-replicas", "2", "--max-replicas", "2"),
    "roles": ("--prefill-replicas", "1", "--decode-replicas", "1"),
}


@dataclass(slots=True)
class Load:
    """Times that the clients saw.

    Attributes:
        gaps: seconds between two tokens of a stream.
        first_tokens: seconds to the first token of long prompts.
    """

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    num_pulled: int = 0


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--address", default="auto", help="of a Ray cluster on this machine")
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), "s")
        for way, options in WAYS.items():
            load = measure(folder, ("--address", arguments.address, *options), arguments.seconds)
            figures |= to_figures(way, load, arguments.seconds)
    report(figures, arguments.json)


def to_figures(way: str, load: Load, seconds: float) -> dict[str, Figure]:
    gaps = 1e3 * np.array(load.gaps)
    note = f"{gaps.size} gaps, {len(load.first_tokens)} long prompts in {seconds:.0f} s"
    name = f"split_server.{way}"
    return {
        **{
            f"{name}.gap.{label}": Figure(float(np.quantile(gaps, share)), "ms", note)
            for label, share in {"p50": 0.5, "p99": 0.99, "p999": 0.999, "longest": 1.0}.items()
        },
        f"{name}.long.first_token": Figure(1e3 * float(np.mean(load.first_tokens)), "ms", note),
        f"{name}.tokens": Figure(gaps.size / seconds, "tokens/s", note),
        f"{name}.pulled": Figure(load.num_pulled, "sequences", note),
    }


def measure(model: str, options: tuple[str, ...], seconds: float) -> Load:
    """Serve with the options, and send the load."""
    server = ServerProcess(model, *COMMON, *options)
    try:
        server.wait_ready(READY_TIMEOUT_S)
        with Client(server.address) as client:
            wait_until_ready(client)
            run(client, WARM_UP_S)
            load = run(client, seconds)
            load.num_pulled = sum(replica.kv.num_kv_pulls for replica in client.fleet().replicas)
            for model_name in {replica.model for replica in client.fleet().replicas}:
                client.delete(model_name)  # the fleet outlives its gateway
        server.stop()
        return load
    finally:
        server.close()


def wait_until_ready(client: Client) -> None:
    """Wait for two replicas. Raises TimeoutError after READY_TIMEOUT_S."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while sum(replica.ready for replica in client.fleet().replicas) < len(WAYS):
        if time.monotonic() > deadline:
            raise TimeoutError(f"two replicas are not ready after {READY_TIMEOUT_S:.0f} s")
        time.sleep(0.5)


def run(client: Client, seconds: float) -> Load:
    """Send the load for some time."""
    load, rng = Load(), random.Random(time.time())
    over = threading.Event()

    def prompt(length: int) -> list[int]:
        return [rng.randrange(300, TOKENIZER_LEN) for _ in range(length)]

    def stream() -> None:
        params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        while not over.is_set():
            times = token_times(client, prompt(40), params)
            load.gaps.extend(after - before for before, after in pairwise(times))

    def send_long() -> None:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        while not over.wait(LONG_INTERVAL_S):
            began_at = time.perf_counter()
            load.first_tokens.append(token_times(client, prompt(LONG_PROMPT_LEN), params)[0] - began_at)

    with ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
        running = [threads.submit(stream) for _ in range(NUM_STREAMS)] + [threads.submit(send_long)]
        time.sleep(seconds)
        over.set()
        for each in running:
            each.result()
    return load


def token_times(client: Client, prompt: list[int], params: SamplingParams) -> list[float]:
    """Return when each token of an output came; tokens that came together have the same time."""
    times: list[float] = []
    for delta in client.generate_stream(prompt, params):
        now = time.perf_counter()
        times += [now] * len(getattr(delta, "token_ids", ()))
    return times


if __name__ == "__main__":
    main()
