"""Prompts are rendered and tokenized within limits, in processes that are replaced when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loop_stall import shortest_stall

from quire.cluster.text.requests.chat import Chat
from quire.cluster.text.requests.chat_template import Rendering, TemplateError, prepare_rendering
from quire.cluster.text.requests.tokenizer import MAX_PROMPT_CHARS, LocalPromptEncoder, Tokenizer
from quire.cluster.text.sandbox import tokenizer_workers, worker_pool
from quire.cluster.text.sandbox.tokenizer_workers import MAX_LOCAL_CHARS, TokenizerWorkers
from quire.proto.errors import InvalidRequest, Overloaded, ReplicaUnavailable, ShuttingDown

LONG_TEXT = "The quick brown fox, naïve — and 1,024 dogs.\n" * 200
TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(make_model: Callable[..., Path]) -> Tokenizer:
    return Tokenizer(str(make_model("llama")))


@pytest.fixture(scope="module")
def workers(tokenizer: Tokenizer) -> Iterator[TokenizerWorkers]:
    workers = TokenizerWorkers(tokenizer, 2)
    workers.start()
    yield workers
    workers.close()


def rendering(source: str, **options: object) -> Rendering:
    chat = Chat([{"role": "user", "content": "What is a quire? 💡"}], template_options=options)
    return prepare_rendering(chat, source, {"bos_token": "<|endoftext|>"})


def pids(workers: TokenizerWorkers) -> list[int]:
    return [worker.process.pid for worker in workers._workers if worker.process is not None]


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_worker_tokenizes_as_this_process(
    workers: TokenizerWorkers, tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    expected = tokenizer.encode(LONG_TEXT, add_special_tokens=add_special_tokens)
    assert workers.encode_text(LONG_TEXT, add_special_tokens=add_special_tokens).tolist() == expected
    assert workers.encode_text("A dog", add_special_tokens=True).tolist() == tokenizer.encode("A dog")


def test_worker_renders_as_this_process(workers: TokenizerWorkers, tokenizer: Tokenizer) -> None:
    token_ids, end = workers.encode_chat(rendering(TEMPLATE, number=1, deep={"a": [1.5, None, True]}))
    expected_ids, expected_end = LocalPromptEncoder(tokenizer).encode_chat(rendering(TEMPLATE))
    assert (token_ids.tolist(), end) == (expected_ids.tolist(), expected_end)
    assert end == "<|endoftext|>user: What is a quire? 💡\n"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'a' * 10**9 }}", "too much memory|more than"),
        ("{{ ('a' * 10**12) | length }}", "too much memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "within 0.2 s"),
        ("{% for i in range(99999) %}{{ 'abcdefghij' * 100 }}{% endfor %}", f"more than {MAX_PROMPT_CHARS}"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% for", "unexpected|Expected"),
        ("{{ messages[0].__class__.mro() }}", "unsafe"),
        ("{{ '%0999999999d' % 1 }}", "too much memory|more than"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion|too many|nested|memory"),
    ],
)
def test_template_beyond_the_limits_is_refused_in_words(
    workers: TokenizerWorkers, template: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_workers, "RENDER_TIME_S", 0.2 if problem == "within 0.2 s" else 60.0)
        with pytest.raises((TemplateError, InvalidRequest), match=f"(?i){problem}"):
            workers.encode_chat(rendering(template))
    assert workers.encode_chat(rendering("{{ messages[0].role }}"))[1] == "user"


def test_operation_that_cannot_be_interrupted_ends_with_its_process(
    workers: TokenizerWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_workers, "TASK_TIMEOUT_S", 0.5)
        with pytest.raises(InvalidRequest, match="was not tokenized within"):
            workers.encode_chat(rendering("{{ 9 ** (9 ** 9) }}"))
    assert workers.encode_chat(rendering("{{ messages[0].role }}"))[1] == "user"


def test_worker_that_was_killed_is_replaced(workers: TokenizerWorkers) -> None:
    """A killed process is no fault of the prompt, which is answered by the next one."""
    workers.encode_text(LONG_TEXT, add_special_tokens=True)
    before = pids(workers)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert len(workers.encode_text(LONG_TEXT, add_special_tokens=True))
    assert not set(before) & set(pids(workers))


def test_prompt_whose_workers_are_killed_is_unavailable(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = TokenizerWorkers(tokenizer, 1)
    (worker,) = workers._workers
    start = worker.start

    def start_and_kill() -> None:
        start()
        worker.kill()

    try:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "start", start_and_kill)
            with pytest.raises(ReplicaUnavailable, match="was killed twice"):
                workers.encode_text(LONG_TEXT, add_special_tokens=True)
        assert len(workers.encode_text(LONG_TEXT, add_special_tokens=True))
    finally:
        workers.close()


def test_worker_that_does_not_answer_is_replaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = TokenizerWorkers(tokenizer, 1)
    try:
        workers.encode_text(LONG_TEXT, add_special_tokens=True)
        (pid,) = pids(workers)
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(tokenizer_workers, "TASK_TIMEOUT_S", 0.05)
            with pytest.raises(InvalidRequest, match=r"was not tokenized within 0\.05 s"):
                workers.encode_text(LONG_TEXT, add_special_tokens=True)
        assert len(workers.encode_text(LONG_TEXT, add_special_tokens=True))
    finally:
        workers.close()


def test_full_pool_refuses_within_its_deadline(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "QUEUE_TIMEOUT_S", 0.01)
    workers = TokenizerWorkers(tokenizer, 1)
    try:
        with workers._worker(), pytest.raises(Overloaded, match="no process was free"):
            workers.encode_text(LONG_TEXT, add_special_tokens=True)
        monkeypatch.setattr(worker_pool, "MAX_WAITING", 0)
        with pytest.raises(Overloaded, match="0 calls wait already"):
            workers.encode_text(LONG_TEXT, add_special_tokens=True)
    finally:
        workers.close()


def test_threads_share_the_workers(workers: TokenizerWorkers, tokenizer: Tokenizer) -> None:
    texts = [LONG_TEXT + "x" * count for count in range(6)]
    results: dict[int, list[int]] = {}

    def encode(index: int) -> None:
        results[index] = workers.encode_text(texts[index], add_special_tokens=False).tolist()

    threads = [threading.Thread(target=encode, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {
        index: tokenizer.encode(text, add_special_tokens=False) for index, text in enumerate(texts)
    }
    assert len(pids(workers)) <= 2
    assert len(LONG_TEXT) > MAX_LOCAL_CHARS


def test_close_ends_the_processes(tokenizer: Tokenizer) -> None:
    workers = TokenizerWorkers(tokenizer)
    workers.start()
    (process,) = [worker.process for worker in workers._workers if worker.process is not None]
    workers.close()
    assert process.returncode is not None
    workers.close()
    with pytest.raises(ShuttingDown, match="to tokenize the prompt"):
        workers.encode_text(LONG_TEXT, add_special_tokens=True)


async def test_long_prompt_does_not_stall_the_event_loop(workers: TokenizerWorkers) -> None:
    """Tokenizing this text in the process itself stalls it for 24 times the limit."""
    text = LONG_TEXT * 40

    async def encode() -> None:
        assert len(await asyncio.to_thread(workers.encode_text, text, add_special_tokens=True)) > 40 * 200

    await asyncio.to_thread(workers.encode_text, LONG_TEXT, add_special_tokens=True)
    assert await shortest_stall(encode, 10) <= 10


def test_longest_token_bounds_the_characters_of_a_text(tokenizer: Tokenizer) -> None:
    longest = tokenizer.max_chars(1)
    assert longest is not None
    text = LONG_TEXT + "the " * 100
    assert len(text) <= longest * len(tokenizer.encode(text))
