"""A server of two tensor-parallel ranks, used through its clients."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reference import Reference

from quire import AsyncClient, Client, ReplicaInfo, SamplingParams, errors
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished, RequestStarted
from quire.kernels.native.library import is_available

pytestmark = pytest.mark.cluster

PROMPTS = (
    "It was a dark evening, and",
    "The",
    "KING RICHARD:\nWhat news, my lord? The night is dark, and I have heard no word.\n\n",
    "My dear sister, we have had no rest since the rain began, and the road to the town is under water. " * 4,
    "My dear sister, we have had no rest since the rain began, and the road to the town is under water. " * 4
    + "I",
    "She said that",
    "Holmes",
    "Prince Andrew looked at the river and",
)
LENGTHS = (40, 1, 33, 15, 64, 17, 16, 48)


@pytest.fixture
def client(server: ServerProcess) -> Any:
    with Client(server.address) as connected:
        yield connected


def replica_of(client: Client) -> ReplicaInfo:
    (replica,) = client.status()
    return replica


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_stream_has_start_deltas_and_end(client: Client) -> None:
    events = list(client.generate_stream(PROMPTS[0], SamplingParams(max_tokens=8, temperature=0.0)))
    assert isinstance(events[0], RequestStarted)
    assert isinstance(events[-1], CompletionFinished)
    deltas = [event for event in events[1:-1] if isinstance(event, CompletionDelta)]
    assert [delta.sequence_number for delta in deltas] == list(range(1, len(deltas) + 1))
    assert sum(len(delta.token_ids) for delta in deltas) == events[-1].usage.completion_tokens == 8
    assert events[0].prompt_tokens == events[-1].usage.prompt_tokens


def test_status_names_two_live_ranks(client: Client) -> None:
    replica = replica_of(client)
    assert replica.ready
    assert replica.model == "demo"
    assert [rank.rank for rank in replica.ranks] == [0, 1]
    assert len({rank.pid for rank in replica.ranks}) == 2
    assert replica.kv.num_blocks == 63  # and the scratch block


@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
def test_log_names_the_instruction_set_of_all_ranks_once(server: ServerProcess) -> None:
    (line,) = [line for line in server.log.splitlines() if "C++ ops use the instruction set" in line]
    assert re.search(r"INFO quire\.kernels\.native\.build: replica-\w+: C\+\+ ops use", line)


def test_greedy_tokens_of_mixed_batches_equal_transformers(client: Client, demo_model_dir: Path) -> None:
    reference = Reference(demo_model_dir)

    def generate(index: int) -> list[int]:
        params = SamplingParams(max_tokens=LENGTHS[index], temperature=0.0, ignore_eos=True)
        return client.generate(PROMPTS[index], params).outputs[0].token_ids

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        outputs = list(pool.map(generate, range(len(PROMPTS))))
    for prompt, length, output in zip(PROMPTS, LENGTHS, outputs, strict=True):
        assert len(output) == length
        reference.check_greedy_text(prompt, output)


def test_client_that_disconnects_frees_its_blocks(client: Client) -> None:
    assert wait_until(lambda: replica_of(client).kv.num_used_blocks == 0)

    def is_canceled() -> bool:
        """Leave a stream early; return False if it was finished before, because this process had to wait."""
        num_finished = replica_of(client).queue.num_finished
        stream = client.generate_stream(PROMPTS[0], SamplingParams(max_tokens=900, ignore_eos=True))
        deltas = (event for event in stream if isinstance(event, CompletionDelta))
        for _ in range(3):
            next(deltas, None)
        held = replica_of(client).kv.num_used_blocks
        stream.close()
        assert wait_until(lambda: replica_of(client).kv.num_used_blocks == 0)
        replica = replica_of(client)
        assert replica.queue.num_running == replica.queue.num_waiting == 0
        return held > 0 and replica.queue.num_finished == num_finished

    assert wait_until(is_canceled)


def test_thousand_concurrent_requests_on_a_small_pool_all_finish(server: ServerProcess) -> None:
    async def generate_all() -> list[int]:
        async with AsyncClient(server.address) as client:

            async def generate(number: int) -> int:
                params = SamplingParams(max_tokens=1 + number % 6, seed=number, ignore_eos=True)
                result = await client.generate([1 + number % 3000, 7, 9], params)
                return len(result.outputs[0].token_ids)

            return await asyncio.gather(*(generate(number) for number in range(1000)))

    assert asyncio.run(generate_all()) == [1 + number % 6 for number in range(1000)]
    with Client(server.address) as client:
        assert wait_until(lambda: replica_of(client).kv.num_used_blocks == 0)
        assert replica_of(client).ready


def test_prompt_beyond_the_pool_is_refused_and_the_server_keeps_serving(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest):
        client.generate([5] * 1020, SamplingParams(max_tokens=1))
    with pytest.raises(errors.InvalidRequest):
        client.generate("", SamplingParams(max_tokens=1))
    with pytest.raises(errors.ModelNotFound):
        client.generate("The", model="another")
    (output,) = client.generate("The", SamplingParams(max_tokens=2, ignore_eos=True)).outputs
    assert len(output.token_ids) == 2


def test_same_seed_gives_the_same_tokens_alone_and_in_a_batch(client: Client) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)
    alone = client.generate(PROMPTS[0], params).outputs[0].token_ids
    crowd = [
        threading.Thread(target=client.generate, args=(prompt, SamplingParams(max_tokens=32, seed=number)))
        for number, prompt in enumerate(PROMPTS)
    ]
    for thread in crowd:
        thread.start()
    assert client.generate(PROMPTS[0], params).outputs[0].token_ids == alone
    for thread in crowd:
        thread.join()
