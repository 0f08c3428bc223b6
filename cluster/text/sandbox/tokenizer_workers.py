"""TokenizerWorkers: a PromptEncoder that works in processes of its own, so that no prompt holds up this one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.errors import InvalidRequest
from ..requests.chat_template import Rendering, TemplateError
from ..requests.tokenizer import END_CHARS, MAX_PROMPT_CHARS, LocalPromptEncoder, Tokenizer
from .worker_pool import LimitExceeded, WorkerPool

# Tenants may use two at once for prompts without and two with a constraint.
NUM_WORKERS = 5
# A shorter text is tokenized in the caller's thread, in a few milliseconds.
MAX_LOCAL_CHARS = 4096
# From the task to its answer, with the start of the process. Tokenizing 4 MB takes 10 s on a core of its own.
TASK_TIMEOUT_S = 30.0
# Processor time of a rendering. A conversation of 4,096 messages takes 0.03 s with a template like Qwen3's.
RENDER_TIME_S = 2.0


class TokenizerWorkers(WorkerPool):
    """Processes that render and tokenize the prompts of one model. Threads may share one; calls block.

    The methods raise the errors of `run` that are no fault of the prompt, and InvalidRequest if the limits
    do not suffice.
    """

    def __init__(self, tokenizer: Tokenizer, num_workers: int = NUM_WORKERS) -> None:
        self._local = LocalPromptEncoder(tokenizer)
        super().__init__("tokenize", tokenizer.to_json().encode(), num_workers, "tokenize the prompt")

    def encode_text(self, text: str, *, add_special_tokens: bool, pair: str | None = None) -> IntArray:
        """Return the token ids."""
        if len(text) + len(pair or "") <= MAX_LOCAL_CHARS:
            return self._local.encode_text(text, add_special_tokens=add_special_tokens, pair=pair)
        return self._encode({"text": text, "pair": pair, "add_special_tokens": add_special_tokens})[0]

    def encode_chat(self, rendering: Rendering) -> tuple[IntArray, str]:
        """Raises TemplateError as well."""
        task = {
            "source": rendering.source,
            "variables": rendering.variables,
            "ends_at_mark": rendering.ends_at_mark,
            "expansions": rendering.expansions.by_kind,
            "max_chars": MAX_PROMPT_CHARS,
            "render_time_s": RENDER_TIME_S,
            "add_special_tokens": False,
        }
        return self._encode(task)

    def _encode(self, task: dict[str, Any]) -> tuple[IntArray, str]:
        try:
            answer = self.run({**task, "end_chars": END_CHARS}, TASK_TIMEOUT_S)
        except TimeoutError:
            problem = f"was not tokenized within {TASK_TIMEOUT_S:g} s; send a shorter one, or token ids"
            raise InvalidRequest("prompt", problem) from None
        except LimitExceeded:
            problem = "needs too much memory to be tokenized; send a shorter one"
            raise InvalidRequest("prompt", problem) from None
        if "template_error" in answer:
            raise TemplateError(answer["template_error"])
        if "error" in answer:
            raise InvalidRequest("prompt", answer["error"])
        return np.frombuffer(answer["ids"], dtype=np.int32), answer["end"]
