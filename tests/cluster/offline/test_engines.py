"""AsyncLLMEngine and LLMEngine: parts of outputs, requests that come and go, commands; and further calls of vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_replica import Brake
from narrowing import instance_of

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    FlatLogprobs,
    LLMEngine,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from quire.cluster.offline.in_process import InProcessEngine
from quire.proto.errors import InvalidRequest, ReplicaUnavailable

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 256, "max_num_seqs": 8,
}  # fmt: skip
PROMPT = "The capital of France is"


def greedy(max_tokens: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(str(model_dir), **OPTIONS)) as opened:
        yield opened


def run_all(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_steps_return_the_outputs_of_llm_in_the_parts_that_were_asked_for(
    engine: LLMEngine, llm: LLM
) -> None:
    (whole,) = llm.generate(PROMPT, greedy(n=2))
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPT, greedy(n=2, output_kind=kind))
    assert engine.get_num_unfinished_requests() == 3
    outputs = run_all(engine)
    for kind in RequestOutputKind:
        parts = outputs[kind.name]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].prompt == PROMPT
    assert outputs["FINAL_ONLY"][0].outputs == whole.outputs
    assert len(outputs["FINAL_ONLY"]) == 1
    assert outputs["CUMULATIVE"][-1].outputs == whole.outputs
    for index, completion in enumerate(whole.outputs):
        deltas = [each for part in outputs["DELTA"] for each in part.outputs if each.index == index]
        assert "".join(each.text for each in deltas) == completion.text
        assert [token_id for each in deltas for token_id in each.token_ids] == completion.token_ids
        assert deltas[-1].finish_reason == "length"
        so_far = [len(part.outputs[index].token_ids) for part in outputs["CUMULATIVE"]]
        assert so_far == sorted(so_far)


def test_stop_string_ends_a_request(engine: LLMEngine, llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, greedy(12))
    stop = next(character for character in whole.outputs[0].text if character.isalpha())
    engine.add_request("stopped", PROMPT, greedy(12, stop=stop))
    last = run_all(engine)["stopped"][-1].outputs[0]
    assert last.stop_reason == stop
    assert last.text == whole.outputs[0].text.partition(stop)[0]


def test_aborted_request_has_no_further_output(engine: LLMEngine) -> None:
    engine.add_request("endless", PROMPT, greedy(200))
    engine.add_request("short", PROMPT, greedy(2))
    engine.abort_request(["endless", "unknown"])
    assert set(run_all(engine)) == {"short"}
    assert engine.step() == []


def test_wrong_request_is_refused_before_it_runs(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest, match="prompt: is empty"):
        engine.add_request("empty", "", greedy())
    engine.add_request("same", PROMPT, greedy())
    engine._run(asyncio.wait([engine._reading["same"]]))  # it has ended; its outputs are still to be returned
    with pytest.raises(InvalidRequest, match="request_id: is 'same'"):
        engine.add_request("same", PROMPT, greedy())
    assert set(run_all(engine)) == {"same"}


async def test_asynchronous_requests_run_together_and_can_be_aborted(model_dir: Path, llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, greedy())
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(model_dir), **OPTIONS))
    brake = Brake()
    brake.install(instance_of(InProcessEngine, engine._loaded.engine)._group)
    try:

        async def last(name: str) -> RequestOutput:
            outputs = [output async for output in engine.generate(PROMPT, greedy(), name)]
            return outputs[-1]

        finished = await asyncio.gather(*(last(f"request {index}") for index in range(4)))
        assert all(output.outputs == whole.outputs for output in finished)

        brake.slow_down()  # so that the two requests do not end before the caller ends them
        async for output in engine.generate(PROMPT, greedy(200), "left"):
            assert not output.finished
            break  # ends the request

        async def aborted() -> None:
            async for _ in engine.generate(PROMPT, greedy(200), "aborted"):
                await engine.abort("aborted")

        with pytest.raises(ReplicaUnavailable, match="request aborted was aborted"):
            await aborted()
        brake.speed_up()

        assert await engine.reset_prefix_cache()
        await engine.sleep()
        assert await engine.is_sleeping()
        await engine.wake_up()
        assert (await last("awake")).outputs == whole.outputs
        await engine.check_health()
        (rank,) = await engine.collective_rpc("rank_status")
        assert rank["device"] == "cpu"
        assert engine.is_running
    finally:
        await engine.aclose()
    assert [engine.is_running] == [False]
    with pytest.raises(ReplicaUnavailable, match="was shut down"):
        await last("late")


def test_prompt_of_a_chat_is_the_text_of_its_template(llm: LLM) -> None:
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], greedy(), chat_template=template)
    assert output.prompt is not None
    assert output.prompt.endswith("<Hi>")


def test_flat_logprobs_have_the_same_values(llm: LLM) -> None:
    (flat,) = llm.generate(PROMPT, greedy(logprobs=2, prompt_logprobs=1, flat_logprobs=True))
    (listed,) = llm.generate(PROMPT, greedy(logprobs=2, prompt_logprobs=1))
    own, other = flat.outputs[0].logprobs, listed.outputs[0].logprobs
    assert isinstance(own, FlatLogprobs)
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(own) == other
    assert list(flat.prompt_logprobs)[1:] == list(listed.prompt_logprobs or ())[1:]
    assert flat.prompt_logprobs[0] == {}
    assert own[1:3] == FlatLogprobs.of((other or [])[1:3])
    assert len(own.token_ids) == len(own.ranks) == own.end_indices[-1]


def test_optional_settings_of_none_are_the_defaults() -> None:
    params = SamplingParams.from_optional(n=None, temperature=0.5, logit_bias={"3": 1000.0}, stop=None)
    assert params == SamplingParams(temperature=0.5, logit_bias={3: 100.0})
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(InvalidRequest, match=r"logprob_token_ids: is .*use logprobs=-1"):
        SamplingParams(logprob_token_ids=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="output_kind: is 7"):
        SamplingParams(output_kind=7)  # type: ignore[arg-type]


def test_prefix_cache_can_be_reset(llm: LLM) -> None:
    def num_cached() -> int:
        return llm.generate({"prompt_token_ids": [5] * 40}, greedy(1))[0].outputs[0].usage.cached_tokens

    num_cached()
    assert num_cached() > 0
    assert llm.reset_prefix_cache()
    assert num_cached() == 0


def test_metrics_have_names_of_vllm(llm: LLM) -> None:
    def value(name: str) -> float:
        (metric,) = (each for each in llm.get_metrics() if each.name == name)
        number: float = metric.value  # type: ignore[attr-defined]
        return number

    before = value("quire_finished_sequences")
    llm.generate([PROMPT] * 3, greedy())
    assert value("quire_finished_sequences") == before + 3
    assert value("vllm:num_requests_running") == 0


def test_collective_calls_take_names_of_a_list_only(llm: LLM) -> None:
    assert llm.collective_rpc("reset_prefix_cache") == [None]
    (rank,) = llm.collective_rpc("rank_status")
    assert rank["rank"] == 0
    assert llm.collective_rpc("sleep", kwargs={"level": 1}) == [None]
    assert llm.collective_rpc("wake_up") == [None]
    for method, args, problem in (
        ("__reduce__", (), "method: is '__reduce__', must be one of sleep, wake_up"),
        (print, (), "method: is of type builtin_function_or_method"),
        ("sleep", (1, 2), "args: are not those of sleep"),
        ("sleep", (3,), "level: is 3"),
        ("wake_up", (5,), "tags: are of type int"),
        ("update_weights", (5, "a"), "path: is of type int"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            llm.collective_rpc(method, args=args)  # type: ignore[arg-type]


def test_vectors_are_tensors(model_dir: Path) -> None:
    with LLM(str(model_dir), runner="pooling", **OPTIONS) as embedder:
        (vector,) = embedder.encode(PROMPT)
        assert isinstance(vector, PoolingRequestOutput)
        (embedding,) = embedder.embed(PROMPT)
        assert isinstance(embedding, PoolingRequestOutput)
        assert torch.equal(vector.outputs.data, torch.tensor(embedding.outputs.embedding))
        with pytest.raises(InvalidRequest, match="embeds prompts; classify is not for it"):
            embedder.reward(PROMPT)
        with pytest.raises(InvalidRequest, match="pooling_task: is 'token_embed'"):
            embedder.encode(PROMPT, pooling_task="token_embed")
