"""Conversations: chat templates, the model's sampling defaults, invalid messages, and `quire chat`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from narrowing import not_none
from serving import ServerFactory
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from quire import LLM, AsyncClient, SamplingParams
from quire.cluster.cli.exit_status import INTERRUPTED
from quire.cluster.text.chat_format.deltas import AssistantMessage, collect_message
from quire.cluster.text.requests.chat import MAX_MESSAGES, Chat
from quire.cluster.text.requests.chat_encoder import ChatEncoder
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished, RequestStarted
from quire.cluster.text.requests.tokenizer import LocalPromptEncoder, Tokenizer
from quire.proto.errors import InvalidRequest
from quire.proto.options.sections import ChatOptions
from quire.proto.sampling import SamplingDefaults

TEMPLATE = """{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant") -%}
{{ raise_exception("nobody is called " + message.role) }}
{%- endif -%}
<|endoftext|>{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if quietly %}hush {% endif -%}
{%- if add_generation_prompt %}<|endoftext|>assistant: {% if thinking %}<think>{% endif %}{% endif -%}"""
DEFAULTS = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3, "do_sample": True}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a quire?"}]
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def chat_dir(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and recommended settings."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(make_model("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | DEFAULTS))
    return folder


@pytest.fixture(scope="module")
def tokenizer(chat_dir: Path) -> Tokenizer:
    return Tokenizer(str(chat_dir))


def encode(tokenizer: Tokenizer, chat: Chat, **config: Any) -> list[int]:
    return (
        ChatEncoder(ChatOptions(**config), tokenizer, LocalPromptEncoder(tokenizer))
        .encode(chat)
        .token_ids.tolist()
    )


def test_prompt_equals_transformers_chat_template(tokenizer: Tokenizer, chat_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(chat_dir)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer, Chat(MESSAGES)) == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == (
        "<|endoftext|>system: Be brief.\n<|endoftext|>user: What is a quire?\n<|endoftext|>assistant: "
    )


def test_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    begun = Chat([*MESSAGES, {"role": "assistant", "content": "It is"}], continue_final_message=True)
    assert tokenizer.decode(encode(tokenizer, begun)).endswith("assistant: It is")


def test_members_of_other_servers_messages_are_ignored(tokenizer: Tokenizer) -> None:
    others = {"provider_specific_fields": {"x": 1}, "thinking_blocks": [{}], "images": ["x"], "refusal": "no"}
    replayed = [message | others for message in MESSAGES]
    assert encode(tokenizer, Chat(replayed)) == encode(tokenizer, Chat(MESSAGES))


def test_template_options_reach_the_template(tokenizer: Tokenizer) -> None:
    quiet = Chat(MESSAGES, template_options={"quietly": True})
    assert "hush" in tokenizer.decode(encode(tokenizer, quiet))
    assert "hush" not in tokenizer.decode(encode(tokenizer, Chat(MESSAGES)))


@pytest.mark.parametrize(
    ("messages", "options", "field", "problem"),
    [
        ([], {}, "chat.messages", "are 0, must be 1 to"),
        ([MESSAGES[0]] * (MAX_MESSAGES + 1), {}, "chat.messages", f"are {MAX_MESSAGES + 1}"),
        ([{"role": "user"}], {}, "chat.messages[0]", "must have role and content"),
        ([{"content": "x"}], {}, "chat.messages[0]", "must have role and content"),
        (["hello"], {}, "chat.messages[0]", "is 'hello', must be an object"),
        (
            [{"role": "assistant", "content": None, "function_call": {"name": "f"}}],
            {},
            "chat.messages[0]",
            "has 'function_call', must have content or tool_calls",
        ),
        ([{"role": "", "content": "x"}], {}, "chat.messages[0].role", "has 0 characters"),
        ([{"role": "user", "content": 5}], {}, "chat.messages[0].content", "is 5, must be text"),
        ([{"role": "user", "content": "\ud800"}], {}, "chat.messages[0].content", "not valid Unicode"),
        ([{"role": "user", "content": "x" * 5_000_000}], {}, "chat.messages", "have 5000000 characters"),
        (
            MESSAGES,
            {"chat_template": "{{ 1 }}"},
            "chat.template_options['chat_template']",
            "is reserved",
        ),
        ([{"role": "king", "content": "x"}], {}, "chat", "rejects it: nobody is called king"),
        (MESSAGES, {"tools": []}, "chat.template_options['tools']", "is reserved"),
        (MESSAGES, {"x": float("nan")}, "chat.template_options['x']", "has nan, must be finite"),
        (
            MESSAGES,
            {"x": {1, 2}},
            "chat.template_options['x']",
            "has a value of type set, must be JSON values only",
        ),
    ],
)
def test_invalid_conversation_is_refused(
    messages: Any, options: dict[str, Any], field: str, problem: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        encode(tokenizer, Chat(messages, template_options=options))
    assert caught.value.field == field


def test_special_tokens_are_not_doubled(chat_dir: Path, tmp_path: Path) -> None:
    """A tokenizer adds a special token to every text: not to rendered chats, which have their own, nor to words."""
    folder = tmp_path / "model"
    shutil.copytree(chat_dir, folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    (start,) = loaded.convert_tokens_to_ids(["<|endoftext|>"])
    loaded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    loaded.save_pretrained(folder)
    tokenizer = Tokenizer(str(folder))
    text = tokenizer.encode("The dog")
    assert text == [start, *tokenizer.encode("The dog", add_special_tokens=False)]
    assert start not in text[1:]
    chat = encode(tokenizer, Chat(MESSAGES))
    assert chat[0] == start
    assert chat[1] != start
    assert not any(start in spelling for spelling in tokenizer.word_token_ids("dog"))


def test_model_without_a_template_refuses_chats(make_model: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest, match="the model has no chat template"):
        encode(Tokenizer(str(make_model("llama"))), Chat(MESSAGES))


def test_llm_chat_uses_the_model_s_sampling_defaults(chat_dir: Path) -> None:
    with LLM(str(chat_dir), device="cpu", num_kv_blocks=64) as llm:
        assert llm.config.model.sampling_defaults == SamplingDefaults(0.7, 5, 0.9, 0.0, 1.3)
        unset = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
        explicit = SamplingParams(
            max_tokens=12,
            seed=3,
            ignore_eos=True,
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            repetition_penalty=1.3,
        )
        neutral = SamplingParams(
            max_tokens=12,
            seed=3,
            ignore_eos=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
        )
        first, second = llm.chat([MESSAGES, MESSAGES[1:]], unset)
        assert "system: Be brief.\n" in not_none(first.prompt)
        assert len(not_none(first.prompt_token_ids)) > len(not_none(second.prompt_token_ids))
        (again,) = llm.chat(MESSAGES, explicit)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        (other,) = llm.chat(MESSAGES, neutral)
        assert other.outputs[0].token_ids != first.outputs[0].token_ids
        # Beam search ignores the sampling defaults.
        assert llm.chat(MESSAGES, SamplingParams(max_tokens=4, beam_width=2))[0].outputs[0].score is not None
        with pytest.raises(InvalidRequest, match="nobody is called king"):
            llm.chat([{"role": "king", "content": "x"}])


async def test_chat_over_the_network_equals_generate(serve: ServerFactory, chat_dir: Path) -> None:
    async with serve(model_dir=chat_dir) as server, AsyncClient(server.target) as client:
        params = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
        options = {"template_options": {"quietly": True}, "tenant": "gold"}
        whole = await client.chat(MESSAGES, params, **options)  # type: ignore[arg-type]
        prompt = encode(server.tokenizer, Chat(MESSAGES, template_options={"quietly": True}))
        assert whole.usage.prompt_tokens == len(prompt)
        assert (await client.generate(prompt, params)).outputs == whole.outputs
        events = [event async for event in client.chat_stream(MESSAGES, params, **options)]  # type: ignore[arg-type]
        assert isinstance(events[0], RequestStarted)
        assert (
            "".join(event.text for event in events if isinstance(event, CompletionDelta))
            == whole.outputs[0].text
        )
        assert isinstance(events[-1], CompletionFinished)
        with pytest.raises(InvalidRequest, match="nobody is called king") as caught:
            await client.chat([{"role": "king", "content": "x"}])
        assert caught.value.field == "chat"


async def test_reasoning_over_the_network_is_set_apart(serve: ServerFactory, chat_dir: Path) -> None:
    """The template opens the reasoning, which the model never ends."""
    async with serve(model_dir=chat_dir) as server, AsyncClient(server.target) as client:
        params = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)
        options = {"thinking": True}
        (whole,) = (await client.chat(MESSAGES, params, template_options=options)).outputs
        assert whole.message == AssistantMessage(None, whole.text.strip("\r\n") or None)
        stream = client.chat_stream(MESSAGES, params, template_options=options)
        deltas = [event.chat async for event in stream if isinstance(event, CompletionDelta)]
        assert collect_message(delta for chat in deltas for delta in chat or ()) == whole.message
        (plain,) = (await client.chat(MESSAGES, params)).outputs
        assert plain.message == AssistantMessage(plain.text)
        assert (await client.generate("One", params)).outputs[0].message is None


async def start(*arguments: str, **streams: Any) -> asyncio.subprocess.Process:
    program = "from quire.cluster.cli import main; main()"
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, *arguments, **streams)


async def test_chat_command_reads_turns_from_a_pipe(serve: ServerFactory, chat_dir: Path) -> None:
    """Each line is a turn of one conversation; the second prompt includes the first turn and its output."""
    async with serve(model_dir=chat_dir) as server:
        arguments = "--target", server.target, "--max-tokens", "5", "--seed", "1", "--system", "Be brief."
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = await start("chat", *arguments, **pipes)
        output, errors = await asyncio.wait_for(process.communicate(b"One\n\nTwo\n"), 60)
        assert (process.returncode, errors) == (0, b"")
        assert output.endswith(b"\n")
        lens = {new.seq_id: len(new.token_ids) for plan in server.brake.steps for new in plan.new}
        first, second = list(lens.values())[-2:]  # after the canary's
        assert second > first + 5


async def test_chat_command_fails_once_without_a_template(serve: ServerFactory) -> None:
    async with serve() as server:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = await start("chat", "--target", server.target, **pipes)
        output, errors = await asyncio.wait_for(process.communicate(b"One\nTwo\n"), 60)
        assert (process.returncode, output) == (2, b"")
        assert errors.decode().startswith("quire: chat: is not supported: the model has no chat template")


async def test_chat_command_at_a_terminal(serve: ServerFactory, chat_dir: Path) -> None:
    """Ctrl-C ends an output and Ctrl-D the conversation."""
    async with serve(model_dir=chat_dir) as server:
        master, slave = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        arguments = "--target", server.target, "--max-tokens", "300"
        process = await start("chat", *arguments, **streams)
        os.close(slave)
        try:
            await read_until(master, "> ")
            os.write(master, b"One\n")
            await until(lambda: server.replica.num_running == 1)
            server.brake.hold()
            process.send_signal(signal.SIGINT)
            await read_until(master, "(aborted)", "> ")  # Ctrl-D works only at the prompt
            server.brake.release()
            await until(lambda: server.replica.num_running == 0)
            os.write(master, b"\x04")
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            os.close(master)
            if process.returncode is None:
                process.kill()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def read_until(terminal: int, *wanted: str) -> None:
    """Read until all wanted texts have come, in their order."""
    loop = asyncio.get_running_loop()
    seen = ""
    async with asyncio.timeout(60):
        while not re.search(".*".join(map(re.escape, wanted)), seen, re.DOTALL):
            seen += (await loop.run_in_executor(None, os.read, terminal, 4096)).decode(errors="replace")


async def test_ctrl_c_with_a_pipe_ends_the_chat_command(serve: ServerFactory, chat_dir: Path) -> None:
    async with serve(model_dir=chat_dir) as server:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = await start("chat", "--target", server.target, "--max-tokens", "300", **pipes)
        assert process.stdin is not None
        process.stdin.write(b"One\n")
        await process.stdin.drain()
        await until(lambda: server.replica.num_running == 1)
        server.brake.hold()
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, errors) == (INTERRUPTED, b"")
        server.brake.release()
