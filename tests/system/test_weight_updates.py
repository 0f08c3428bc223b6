"""Weights of two tensor-parallel ranks, changed while they serve: over HTTP and gRPC, from files and from tensors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import READY_TIMEOUT_S
from reference import Reference
from safetensors.torch import load_file

from quire import LLM, Client, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.client.wire.status import ReplicaInfo

pytestmark = pytest.mark.cluster

DEADLINE_S = READY_TIMEOUT_S
PROMPT = [5, 9, 11, 40, 7]
LENGTH = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
TWO_RANKS = ("--tensor-parallel-size", "2", "--num-kv-blocks", "64", "--max-num-seqs", "4", "--audit")


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    return make_model("llama", seed=21), make_model("llama", seed=22)


def check(client: Client, folder: Path, version: str) -> None:
    (output,) = client.generate(PROMPT, GREEDY).outputs
    Reference(folder).check_greedy(PROMPT, output.token_ids)
    assert output.weights_version == version


def test_ranks_of_a_server_sleep_wake_and_change_their_weights(
    folders: tuple[Path, Path], serve: Callable[..., ServerProcess]
) -> None:
    first, second = folders
    server = serve(str(first), *TWO_RANKS, "--server-dev-mode", "--standby-weights")
    with Client(server.address) as client, httpx.Client(base_url=server.http_url, timeout=DEADLINE_S) as http:
        check(client, first, "")
        body = {"path": str(second), "version": "step-1"}
        assert http.post("/update_weights", json=body).json() == {"weights_version": "step-1"}
        check(client, second, "step-1")
        assert http.post("/sleep").status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up").status_code == 200
        check(client, second, "step-1")
        (replica,) = client.status()
        os.kill(
            replica.ranks[1].pid, signal.SIGKILL
        )  # another rank loads the first weights, then the latest ones
        check(client, second, "step-1")
        client.update_weights(str(first), version="step-2")
        check(client, first, "step-2")


def test_sleeping_ranks_that_die_are_replaced_when_the_others_wake(
    folders: tuple[Path, Path],
    serve: Callable[..., ServerProcess],
    scheduler_pid: Callable[[ServerProcess], int],
) -> None:
    first, second = folders
    with Client((server := serve(str(first), *TWO_RANKS)).address) as client:
        check(client, first, "")
        client.sleep()
        before = rank_pids(client)
        os.kill(before[1], signal.SIGKILL)
        await_status(client, lambda replica: "SIGKILL" in replica.problem)
        client.update_weights(str(second), version="step-1")
        client.wake_up()
        check(client, second, "step-1")
        await_status(client, lambda replica: before[1] not in [rank.pid for rank in replica.ranks])
        assert rank_pids(client)[0] == before[0]
        client.sleep()
        os.kill(scheduler_pid(server), signal.SIGKILL)  # the next one does not know of the sleep
        await_status(client, lambda replica: replica.ready)
        check(client, second, "step-1")


def rank_pids(client: Client) -> list[int]:
    (replica,) = client.status()
    return [each.pid for each in replica.ranks]


def await_status(client: Client, condition: Callable[[ReplicaInfo], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(map(condition, client.status())):  # there is none while a scheduler is replaced
        assert time.monotonic() < deadline, client.status()
        time.sleep(0.1)


def test_tensors_of_a_trainer_reach_two_ranks(folders: tuple[Path, Path]) -> None:
    first, second = folders
    with LLM(str(first), device="cpu", tensor_parallel_size=2, num_kv_blocks=64) as llm:
        llm.update_weights(tensors=load_file(second / "model.safetensors"), version="step-1")
        (output,) = llm.generate([PROMPT], GREEDY)
        Reference(second).check_greedy(PROMPT, output.outputs[0].token_ids)
        assert output.outputs[0].weights_version == "step-1"


def test_calls_of_vllm_reach_both_ranks(make_model: Callable[..., Path]) -> None:
    """As tests/cluster/offline/test_engines.py has them for one rank."""
    model = str(make_model("llama", seed=21))
    options: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2, "num_kv_blocks": 64}
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(model, **options) as llm:
        (whole,) = llm.generate({"prompt_token_ids": [5] * 40}, greedy)
        assert llm.generate({"prompt_token_ids": [5] * 40}, greedy)[0].outputs[0].usage.cached_tokens
        assert llm.reset_prefix_cache()
        assert llm.generate({"prompt_token_ids": [5] * 40}, greedy)[0].outputs[0].usage.cached_tokens == 0
        assert [rank["rank"] for rank in llm.collective_rpc("rank_status")] == [0, 1]
        assert llm.collective_rpc("reset_prefix_cache") == [None, None]
        finished = next(each for each in llm.get_metrics() if each.name == "quire_finished_sequences")
        assert finished.value == 3  # type: ignore[attr-defined]
    with LLMEngine(EngineArgs(model, **options)) as engine:
        engine.add_request("one", {"prompt_token_ids": [5] * 40}, greedy)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].outputs == whole.outputs
