"""The official openai package against the HTTP server: completions and chat completions, plain and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chat_model import write_output
from deadlines import CALL_TIMEOUT_S
from local_server import ThreadedServer

from quire.cluster.fleet.replica.canary import run_canary
from quire.cluster.gateway.http import calls

MESSAGES: list[Any] = [{"role": "user", "content": "When?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
REPLY = '<think>Hm.</think>I ask.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server: ThreadedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "quire"


def test_scripted_output_is_whole_after_a_canary(client: openai.OpenAI, server: ThreadedServer) -> None:
    """Gateways send one to an idle replica; a slow client's output may have been written before."""
    write_output(server, "At noon.")
    server.run(run_canary(server.server.replica, CALL_TIMEOUT_S))
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert reply.choices[0].message.content == "At noon."


def test_completion_streams_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="The quick", **GREEDY)
    stream = client.completions.create(
        model="tiny", prompt="The quick", stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text != ""
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert whole.model_extra is not None
    assert whole.model_extra["timings"]["decode_s"] > 0


def test_completion_of_several_prompts_numbers_the_choices(client: openai.OpenAI) -> None:
    prompts: list[Any] = ["The quick", [5, 6, 7], "A book"]
    single = [client.completions.create(model="tiny", prompt=each, **GREEDY) for each in prompts]
    texts = [each.choices[0].text for each in single]
    ids = [[5, 6, 7], [8, 9]]
    whole = client.completions.create(model="tiny", prompt=["The quick", "A book"], n=2, seed=1, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [texts[0]] * 2 + [texts[2]] * 2
    streamed = dict.fromkeys(range(4), "")
    stream = client.completions.create(
        model="tiny", prompt=["The quick", "A book"], n=2, seed=1, stream=True, **GREEDY
    )
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == [choice.text for choice in whole.choices]
    assert len(client.completions.create(model="tiny", prompt=ids, **GREEDY).choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_completion_echo_has_the_prompt_and_its_logprobs(client: openai.OpenAI, stream: bool) -> None:
    made: Any = client.completions.create(
        model="tiny",
        prompt="The quick brown",
        echo=True,
        logprobs=2,
        max_tokens=3,
        stream=stream,
        temperature=0,
    )
    choices = [chunk.choices[0] for chunk in made] if stream else [made.choices[0]]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens]
    logprobs = [each for part in parts for each in part.token_logprobs]
    offsets = [each for part in parts for each in part.text_offset]
    assert text.startswith("The quick brown")
    assert logprobs[0] is None
    assert all(each <= 0 for each in logprobs[1:])
    assert len(tokens) == len(logprobs) == len(offsets)
    assert "".join(tokens).startswith("The quick brown")
    for part in parts:
        for token, top in zip(part.tokens, part.top_logprobs, strict=True):
            assert top is None or (token in top and 2 <= len(top) <= 3)


def test_completion_scores_a_prompt_without_output(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt="The quick", echo=True, logprobs=1, max_tokens=0)
    assert made.choices[0].text == "The quick"
    assert made.usage is not None
    assert made.usage.completion_tokens == 0
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.tokens is not None
    assert "".join(made.choices[0].logprobs.tokens) == "The quick"


def test_prompt_logprobs_of_all_prompts_are_limited(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice repeats those of its prompt."""
    monkeypatch.setattr(calls, "MAX_PROMPT_LOGPROBS", 40)
    scored: Any = {"model": "tiny", "max_tokens": 1, "extra_body": {"prompt_logprobs": 1}}
    client.completions.create(prompt=[[5] * 10, [6] * 10], **scored)
    for more in ({"prompt": [[5] * 10, [6] * 11]}, {"prompt": [[5] * 10], "n": 3}):
        with pytest.raises(openai.BadRequestError, match="makes more than 40 log-probabilities"):
            client.completions.create(**scored, **more)


def test_completion_stream_has_the_prompts_token_ids_once(client: openai.OpenAI) -> None:
    extra: Any = {"return_token_ids": True, "truncate_prompt_tokens": -1}
    stream = client.completions.create(
        model="tiny", prompt=[5] * 9999 + [6, 7], max_tokens=3, stream=True, extra_body=extra
    )
    prompts: list[Any] = [getattr(chunk.choices[0], "prompt_token_ids", None) for chunk in stream]
    assert prompts[0][-3:] == [5, 6, 7]
    assert prompts[1:] == [None] * (len(prompts) - 1)


def test_response_has_logprobs_and_the_fields_of_its_request(client: openai.OpenAI) -> None:
    given: Any = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 3}
    made: Any = client.responses.create(
        model="tiny",
        input="When?",
        max_output_tokens=4,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        extra_body={"ignore_eos": True, "stop": ["\u00ff"], "seed": 1},
        **given,
    )
    assert {name: getattr(made, name) for name in given} == given
    assert made.truncation == "disabled"
    text = next(item for item in made.output if item.type == "message").content[0]
    assert "".join(each.token for each in text.logprobs).startswith(text.text[:1])
    assert all(len(each.top_logprobs) == 2 for each in text.logprobs)
    for wrong in ({"truncation": "auto"}, {"max_tool_calls": 0}, {"extra_body": {"prompt": {"id": "x"}}}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input="x", **wrong)


def test_invocations_are_calls_of_the_endpoint_of_their_body(server: ThreadedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http:
        completion = http.post("/invocations", json={"prompt": [5, 6], "max_tokens": 2, "stream": True})
        assert completion.headers["content-type"].startswith("text/event-stream")
        assert completion.text.endswith("data: [DONE]\n\n")
        chat = http.post("/invocations", json={"messages": MESSAGES, "max_tokens": 2})
        assert chat.json()["object"] == "chat.completion"
        refused = http.post("/invocations", json={"messages": MESSAGES, "n": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "must have one" in http.post("/invocations", json={"x": 1}).json()["error"]["message"]


def test_template_is_applied_to_a_conversation(server: ThreadedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as http:
        made = http.post("/apply-template", json={"messages": MESSAGES})
        counted = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": counted}).json()["prompt"]
    assert made.json() == {"prompt": text}
    assert text.endswith("assistant:")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_have_the_id_that_the_client_chose(server: ThreadedServer, path: str) -> None:
    body = {"prompt": "x", "messages": MESSAGES, "max_tokens": 1}
    with httpx.Client(
        base_url=server.url, headers={"x-request-id": "mine-1"}, timeout=CALL_TIMEOUT_S
    ) as http:
        made = http.post(path, json=body)
    assert made.headers["x-request-id"] == "mine-1"
    assert made.json()["id"].partition("-")[2] == "mine-1"


def test_response_lists_and_counts_its_input(server: ThreadedServer, client: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "12"}
    given: Any = [{"role": "user", "content": "When?"}, call, output]
    write_output(server, "Noon.")
    made: Any = client.responses.create(model="tiny", input=given, instructions="Be brief.")
    items: Any = list(client.responses.input_items.list(made.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert (items[0].content[0].text, items[1].name, items[2].output) == ("When?", "now", "12")
    last = client.responses.input_items.list(made.id, limit=1)
    assert [item.id for item in last.data] == [items[-1].id]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_x")
    counted = client.responses.input_tokens.count(model="tiny", input=given, instructions="Be brief.")
    assert counted.input_tokens == made.usage.input_tokens


def test_token_ids_in_and_out(client: openai.OpenAI) -> None:
    extra: Any = {
        "return_token_ids": True,
        "ignore_eos": True,
        "min_tokens": 4,
        "top_k": 5,
        "cache_salt": "x",
    }
    made: Any = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=4, extra_body=extra, seed=3
    ).choices[0]
    assert made.prompt_token_ids == [5, 6, 7]
    assert len(made.token_ids) == 4


def test_chat_has_reasoning_content_and_tool_calls(server: ThreadedServer, client: openai.OpenAI) -> None:
    write_output(server, REPLY)
    made = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
    message: Any = made.choices[0].message
    assert made.choices[0].finish_reason == "tool_calls"
    assert (message.reasoning_content, message.reasoning, message.content) == ("Hm.", "Hm.", "I ask.")
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {"a": 1})
    write_output(server, "Noon.")  # the conversation goes on as the client sends it back
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
    answered = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, message, result], tools=[TOOL]
    )
    assert answered.choices[0].message.content == "Noon."


def test_chat_stream_adds_up_to_the_message(server: ThreadedServer, client: openai.OpenAI) -> None:
    write_output(server, REPLY)
    stream: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "I ask."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["now"]
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"a": 1}
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 10


def test_stream_helper_parses_the_events(server: ThreadedServer, client: openai.OpenAI) -> None:
    write_output(server, REPLY)
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert final.choices[0].message.content == "I ask."


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: openai.OpenAI, stream: bool) -> None:
    made: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=5, logprobs=True, top_logprobs=3, stream=stream,
        temperature=0, extra_body={"ignore_eos": True},
    )  # fmt: skip
    parts = [chunk.choices[0].logprobs for chunk in made] if stream else [made.choices[0].logprobs]
    entries = [entry for part in parts if part is not None for entry in part.content]
    assert len(entries) == 5
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_chat_options_reach_the_model(server: ThreadedServer, client: openai.OpenAI) -> None:
    """logit_bias decides the token, stop ends the text, n makes several choices."""
    (token_id,) = server.server.tokenizer.encode("q", add_special_tokens=False)
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, max_tokens=8, stop="qqq", seed=4, logit_bias={str(token_id): 100},
        user="someone", extra_body={"chat_template_kwargs": {"enable_thinking": False}, "priority": 1},
    )  # fmt: skip
    assert [choice.message.content for choice in made.choices] == ["", ""]
    assert [choice.finish_reason for choice in made.choices] == ["stop"] * 2
    assert [(choice.model_extra or {})["stop_reason"] for choice in made.choices] == ["qqq"] * 2


async def test_async_client_streams(server: ThreadedServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **GREEDY)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(parts) == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"temperature": -1}, "temperature", "is -1.0, must be from 0 to 100"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "is 0, must be at least 1"),
        ({"max_tokens": "many"}, "max_tokens", "is 'many'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "must"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "is 'xml', must be text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "is empty, must have exactly one"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "use structured_outputs"),
        (
            {"extra_body": {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}},
            "structured_outputs.json",
            "uniqueItems",
        ),
        ({"extra_body": {"temprature": 1}}, "body", "did you mean 'temperature'"),
        ({"functions": [{"name": "f"}]}, "functions", "is not supported: use tools"),
        ({"stop": [""]}, "stop", "1 to 256 characters"),
        ({"stream": True, "temperature": -1}, "temperature", "must be from 0 to 100"),
    ],
)
def test_errors_name_the_field(client: openai.OpenAI, options: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**({"model": "tiny", "messages": MESSAGES} | options))
    assert caught.value.param == param
    assert said in caught.value.message
    assert caught.value.code == "invalid_request"


def test_other_errors_have_their_classes(server: ThreadedServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"suffix: is not supported"):
        client.completions.create(model="tiny", prompt="x", suffix="y")
    with pytest.raises(openai.BadRequestError, match=r"prompt.*leaves no room"):
        client.completions.create(model="tiny", prompt=[1] * 5000)


def test_closed_stream_frees_its_blocks(client: openai.OpenAI) -> None:
    """The fixture `blocks_are_free_after_each_test` waits for the blocks."""
    stream = client.completions.create(
        model="tiny", prompt="x", stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


def test_client_that_leaves_before_the_answer_frees_its_blocks(server: ThreadedServer) -> None:
    options: Any = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    server.server.brake.hold()
    impatient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.2)
    with impatient, pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model="tiny", prompt="x", **options)
    server.server.brake.release()


def test_response_continues_a_response_that_is_kept(server: ThreadedServer, client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    write_output(server, REPLY)
    first = client.responses.create(model="tiny", input="When?", instructions="Be brief.", tools=[tool])
    reasoning, message, call = first.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert first.output_text == "I ask."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("now", {"a": 1})
    assert client.responses.retrieve(first.id).output_text == "I ask."
    write_output(server, "Noon.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    second = client.responses.create(
        model="tiny", input=[result], tools=[tool], previous_response_id=first.id
    )
    assert second.output_text == "Noon."
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    write_output(server, "Noon.")
    items: Any = [{"role": "user", "content": "When?"}, *first.output, result]
    again = client.responses.create(
        model="tiny", input=items, instructions="Be brief.", tools=[tool], store=False
    )
    assert again.output_text == "Noon."
    client.responses.delete(first.id)
    for response_id in (first.id, again.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: is unknown"):
        client.responses.create(model="tiny", input="x", previous_response_id=first.id)


def test_response_stream_adds_up_to_the_response(server: ThreadedServer, client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    write_output(server, REPLY)
    with client.responses.stream(model="tiny", input="When?", tools=[tool]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert final.output_text == "I ask."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    cut = client.responses.create(model="tiny", input="When?", max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
