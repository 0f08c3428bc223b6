"""Two pipeline stages of two ranks: outputs as on one rank, through the failure of a rank of each stage."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from adapters import write_adapter
from deadlines import READY_TIMEOUT_S

from quire import LLM, Client, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.config.engine_options import DEMO_MODEL_PATH

pytestmark = pytest.mark.cluster

DEADLINE_S = READY_TIMEOUT_S
NUM_TOKENS = 200
PROMPT = "It was"
FORM = StructuredOutputsParams(regex="([a-z]{3,9} is the ship of the number [0-9]{2}, ){20}")
KINDS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, logprobs=2),
    "seed, n and penalties": SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, seed=7, n=3, temperature=0.9, repetition_penalty=1.1,
    ),
    "beams": SamplingParams(max_tokens=40, beam_width=3, n=2),
    "form": SamplingParams(max_tokens=NUM_TOKENS, seed=5, structured_outputs=FORM),
    "adapter": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=9),
}  # fmt: skip
ADAPTER = "sea"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / ADAPTER, DEMO_MODEL_PATH)


@pytest.fixture(scope="module")
def server(adapter: Path) -> Iterator[ServerProcess]:
    adapters = "--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}"
    split = "--pipeline-parallel-size", "2", "--tensor-parallel-size", "2"
    started = ServerProcess("demo", *split, "--audit", *adapters)
    try:
        started.wait_ready(READY_TIMEOUT_S)
        yield started
        assert started.stop() == 0, started.log
        assert "Traceback" not in started.log
        assert started.leftovers() == []
    finally:
        started.close()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def one_rank(adapter: Path) -> dict[str, list[list[int]]]:
    """The tokens of each kind on one rank."""
    with LLM("demo", device="cpu", num_kv_blocks=200, enable_lora=True) as llm:
        outputs = {
            name: llm.generate(
                [PROMPT],
                params,
                lora_request=LoRARequest(ADAPTER, 1, str(adapter)) if name == "adapter" else None,
            )
            for name, params in KINDS.items()
        }
    return {name: [list(each.token_ids) for each in result.outputs] for name, (result,) in outputs.items()}


def generate_all(client: Client) -> dict[str, list[list[int]]]:
    with ThreadPoolExecutor(len(KINDS)) as threads:
        calls = {
            name: threads.submit(client.generate, PROMPT, params, model=ADAPTER if name == "adapter" else "")
            for name, params in KINDS.items()
        }
        results = {name: call.result(DEADLINE_S) for name, call in calls.items()}
    return {name: [list(each.token_ids) for each in result.outputs] for name, result in results.items()}


def test_outputs_are_those_of_one_rank(client: Client, one_rank: dict[str, list[list[int]]]) -> None:
    assert generate_all(client) == one_rank


@pytest.mark.parametrize(
    ("rank", "signal_number"), [(0, signal.SIGKILL), (2, signal.SIGKILL), (3, signal.SIGSTOP)]
)
def test_requests_continue_after_a_rank_of_a_stage_failed(
    client: Client, one_rank: dict[str, list[list[int]]], rank: int, signal_number: int
) -> None:
    (before,) = client.status()
    problems: list[str] = []

    def fail() -> None:
        wait_for(lambda: client.status()[0].num_steps > before.num_steps + 20, "the steps did not begin")
        os.kill(before.ranks[rank].pid, signal_number)
        wait_for(is_replaced, "the rank was not replaced")

    def is_replaced() -> bool:
        """Note the replica's problem while it has one, which may be shorter than a status takes."""
        (status,) = client.status()
        if status.activity == "recovering" and status.problem:
            problems.append(status.problem)
        return status.num_recoveries > before.num_recoveries

    with ThreadPoolExecutor(1) as thread:
        failing = thread.submit(fail)
        assert generate_all(client) == one_rank
        failing.result(2 * DEADLINE_S)
    (after,) = client.status()
    assert after.num_recoveries == before.num_recoveries + 1
    layers = "stage 0 of 2, layers 0 to " if rank < 2 else "stage 1 of 2, layers "
    for problem in problems:
        assert f"rank {rank} failed" in problem
        assert layers in problem
    others = [number for number in range(4) if number != rank]
    assert [after.ranks[each].pid for each in others] == [before.ranks[each].pid for each in others]


def wait_for(is_so: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, problem
        time.sleep(0.02)
