"""TextWorkers: a PromptEncoder that works in processes of its own, so that no prompt holds up this one."""

from __future__ import annotations

import os
import queue
import weakref
from typing import Any

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.errors import InvalidRequest, Overloaded, ReplicaUnavailable
from ..requests.chat_template import Rendering, TemplateError
from ..requests.prompt_encoder import END_CHARS, MAX_PROMPT_CHARS, LocalPromptEncoder
from ..requests.tokenizer import Tokenizer
from .worker_process import WorkerProcess

# Tenants may use two at once for prompts without and two with a form. Each process starts when it is needed.
NUM_WORKERS = 5
# A shorter text is tokenized in the caller's thread, in a few milliseconds.
MAX_LOCAL_CHARS = 4096
# From the task to its answer, with the start of the process. Tokenizing 4 MB takes 10 s on a core of its own.
TASK_TIMEOUT_S = 30.0
# Processor time of a rendering. A conversation of 4,096 messages takes 0.03 s with a template like Qwen3's.
RENDER_TIME_S = 2.0
# Until a worker is free.
QUEUE_TIMEOUT_S = 30.0
_PROGRAM = f"{__package__}.text_main"


class TextWorkers:
    """Processes that render and tokenize the prompts of one model. Threads may share one; calls block.

    A worker that takes too long or ends is replaced. The processes end with `close`, or with this process.
    """

    def __init__(self, tokenizer: Tokenizer, num_workers: int = NUM_WORKERS) -> None:
        self._local = LocalPromptEncoder(tokenizer)
        self._descriptor = os.memfd_create("quire-tokenizer")
        _write_all(self._descriptor, tokenizer.to_json().encode())
        self._slots = [
            WorkerProcess(_PROGRAM, [str(self._descriptor)], [self._descriptor]) for _ in range(num_workers)
        ]
        # Last in, first out: the second process starts when two prompts come at once.
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for slot in self._slots:
            self._idle.put(slot)
        self._close = weakref.finalize(self, _close, self._slots, self._descriptor)

    def start(self) -> None:
        """Start the first process, so that the first prompt does not wait for it. Returns at once."""
        self._slots[-1].start()

    def encode_text(self, text: str, *, add_special_tokens: bool, pair: str | None = None) -> IntArray:
        """Return the token ids.

        Raises:
            InvalidRequest: the limits do not suffice.
            Overloaded: no worker is free in time.
            ReplicaUnavailable: the worker was killed twice.
        """
        if len(text) + len(pair or "") <= MAX_LOCAL_CHARS:
            return self._local.encode_text(text, add_special_tokens=add_special_tokens, pair=pair)
        return self._run({"text": text, "pair": pair, "add_special_tokens": add_special_tokens})[0]

    def encode_chat(self, rendering: Rendering) -> tuple[IntArray, str]:
        """Raises TemplateError as well."""
        task = {
            "source": rendering.source,
            "variables": rendering.variables,
            "ends_at_mark": rendering.ends_at_mark,
            "max_chars": MAX_PROMPT_CHARS,
            "render_time_s": RENDER_TIME_S,
            "add_special_tokens": False,
        }
        return self._run(task)

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._close()

    def _run(self, task: dict[str, Any]) -> tuple[IntArray, str]:
        try:
            slot = self._idle.get(timeout=QUEUE_TIMEOUT_S)
        except queue.Empty:
            raise Overloaded(f"no process was free to tokenize the prompt in {QUEUE_TIMEOUT_S:g} s") from None
        try:
            answer = _ask(slot, {**task, "end_chars": END_CHARS})
        finally:
            self._idle.put(slot)
        if "template_error" in answer:
            raise TemplateError(answer["template_error"])
        if "error" in answer:
            raise InvalidRequest("prompt", answer["error"])
        return np.frombuffer(answer["ids"], dtype=np.int32), answer["end"]


def _ask(slot: WorkerProcess, task: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a task, from a second process if the first one is killed, which is no fault of the prompt.

    Raises:
        InvalidRequest: the limits do not suffice.
        ReplicaUnavailable: the second process is killed as well.
    """
    for _ in range(2):
        try:
            answer = slot.run(task, TASK_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequest(
                "prompt", f"was not tokenized within {TASK_TIMEOUT_S:g} s; send a shorter one, or token ids"
            ) from None
        if answer is not None:
            return answer
        if not slot.was_killed:
            raise InvalidRequest("prompt", "needs too much memory to be tokenized; send a shorter one")
    raise ReplicaUnavailable(
        "the process that tokenizes prompts was killed twice; the machine may lack memory"
    )


def _close(slots: list[WorkerProcess], descriptor: int) -> None:
    for slot in slots:
        slot.kill()
    os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
