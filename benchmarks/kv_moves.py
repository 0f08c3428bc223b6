"""Waits of requests whose KV moves: prompts that are computed apart, whole and in chunks, and drained replicas.

    python -m benchmarks.kv_moves --json benchmarks/results/kv_moves.json

Two replicas of one thread each, in processes of their own, with a random model of 64 million parameters and 32 KB of
KV per token. Bytes come from the other process's memory (``memory``), or encrypted over TCP as between hosts
(``stream``).

Figures, medians:

- ``kv_moves.<way>.second_token.whole`` and ``.chunks``: from the first token, of the replica that computed the
  prompt, to the second one, of the other replica: when all blocks travel after the prompt, and when those
  of finished chunks travel while later ones are computed;
- ``kv_moves.<way>.first_token.whole`` and ``.chunks``: the time to the first token of the same requests;
- ``kv_moves.<way>.drain.brings``: the longest gap between tokens of a request whose replica hands it off, with its
  KV; ``kv_moves.drain.computes``: without, so that the other replica computes it;
- ``kv_moves.gap``: between tokens of a replica that does nothing else.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.random_models import TOKENIZER_LEN, make_model
from benchmarks.replica_processes import TwoRoles, clients_of, make_request, replica_processes, token_times
from quire.cluster.fleet.replica.client import ReplicaClient
from quire.cluster.gateway.routing.request_migration import MigratingRequest
from quire.proto.stream import FinishReason

CHUNK_LEN, NUM_OUTPUT_TOKENS = 512, 12
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_num_batched_tokens": CHUNK_LEN, "max_num_seqs": 8, "max_model_len": 16384,
    "num_kv_blocks": 2400,
}  # fmt: skip
ROLES = "prefill", "decode"
_numbers = count()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=6000, help="of each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), "k")
        for way in ("memory", "stream"):
            with replica_processes(folder, ROLES, way, **OPTIONS) as replicas:

                async def run(way: str = way) -> dict[str, Figure]:
                    async with clients_of(*replicas) as (prefill, decode):
                        return await measure(way, prefill, decode, arguments.tokens, arguments.repeats)

                figures |= asyncio.run(run())
    report(figures, arguments.json)


async def measure(
    way: str, prefill: ReplicaClient, decode: ReplicaClient, num_tokens: int, repeats: int
) -> dict[str, Figure]:
    """Return the figures of one way by which bytes come."""
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    await split(prefill, decode, make_prompt(num_tokens), in_chunks=True)  # the first one measures rates
    for _ in range(repeats):
        for name, in_chunks in (("whole", False), ("chunks", True)):
            first_s, gaps = await split(prefill, decode, make_prompt(num_tokens), in_chunks=in_chunks)
            note(f"{way}.second_token.{name}", gaps[0])
            note(f"{way}.first_token.{name}", first_s)
            note("gap", median(gaps[1:]))
        note(f"{way}.drain.brings", await hand_off(prefill, decode, num_tokens, brings_kv=True))
        if way == "memory":
            note("drain.computes", await hand_off(prefill, decode, num_tokens, brings_kv=False))
    text = f"prompts of {num_tokens} tokens in chunks of {CHUNK_LEN}, median of {repeats}"
    return {f"kv_moves.{name}": Figure(1e3 * median(values), "ms", text) for name, values in seconds.items()}


async def split(
    prefill: ReplicaClient, decode: ReplicaClient, prompt: list[int], *, in_chunks: bool
) -> tuple[float, list[float]]:
    """Have one replica compute a prompt and the other continue; return the time to its first token, and gaps."""
    running = MigratingRequest(
        make_request(prompt, NUM_OUTPUT_TOKENS), TwoRoles(prefill, decode, in_chunks=in_chunks)
    )
    began_at = asyncio.get_running_loop().time()
    running.start()
    _, times = await token_times(running)
    return times[0] - began_at, [after - before for before, after in pairwise(times)]


async def hand_off(
    prefill: ReplicaClient, decode: ReplicaClient, num_tokens: int, *, brings_kv: bool
) -> float:
    """Return the time between the last token of one replica and the first of the next one, of an unbroken prompt."""
    request = replace(make_request(make_prompt(num_tokens), NUM_OUTPUT_TOKENS), prefill_only=True)
    first = prefill.submit(request)
    tokens, kv, left_at = list[int](), None, 0.0
    async for _, update in first:
        tokens += update.token_ids
        left_at = asyncio.get_running_loop().time()
        if update.finish is not None:
            assert update.finish.reason is FinishReason.MOVED, update.finish
            kv = update.finish.kv if brings_kv else None
    second = decode.submit(
        replace(make_request(request.prompt_token_ids.tolist(), NUM_OUTPUT_TOKENS).resumed(0, tokens), kv=kv)
    )
    async for _, update in second:
        if update.token_ids:
            second.abort()
            return asyncio.get_running_loop().time() - left_at
    raise RuntimeError("the request ended without a token")


def make_prompt(num_tokens: int) -> list[int]:
    """Return a prompt that no replica has seen."""
    rng = np.random.default_rng(next(_numbers))
    prompt: list[int] = rng.integers(300, TOKENIZER_LEN, num_tokens).tolist()
    return prompt


if __name__ == "__main__":
    main()
