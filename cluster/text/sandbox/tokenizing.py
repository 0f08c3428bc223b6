"""Operation of tokenizer workers: renders a chat template, and tokenizes its prompt or another text."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from ..requests.chat_template import Expansions, Rendering, TemplateError, render
from .limits import limits, used_bytes

# Memory beyond what the idle process has. Tokenizing 4 MB takes 1.2 GB.
RENDER_MEMORY_BYTES = 512 << 20
TOKENIZE_MEMORY_BYTES = 2 << 30


class TimeIsOver(BaseException):
    """The rendering has used up its time. Not an Exception, which `render` would take for the template's own."""


def prepare(setup: bytes) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the operation of a tokenizer, whose JSON the setup is."""
    tokenizer = Tokenizer.from_str(setup.decode())
    return partial(_tokenize, tokenizer, used_bytes())


def _tokenize(tokenizer: Tokenizer, idle_bytes: int, task: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids and the end of the prompt, or the problem."""
    try:
        text = task.get("text")
        if text is None:
            with limits(idle_bytes + RENDER_MEMORY_BYTES, task["render_time_s"], _on_time_over):
                expansions = Expansions(task["expansions"])
                rendering = Rendering(task["source"], task["variables"], task["ends_at_mark"], expansions)
                text = render(rendering, task["max_chars"])
        with limits(idle_bytes + TOKENIZE_MEMORY_BYTES):
            ids = tokenizer.encode(text, task.get("pair"), add_special_tokens=task["add_special_tokens"]).ids
            return {"ids": array("i", ids).tobytes(), "end": text[-task["end_chars"] :]}
    except TemplateError as error:
        return {"template_error": str(error)}
    except TimeIsOver:
        return {"template_error": f"it has not ended within {task['render_time_s']:g} s of processor time"}
    except MemoryError:
        return {"error": "needs too much memory to be tokenized; send a shorter one"}


def _on_time_over(signal_number: int, frame: object) -> None:
    raise TimeIsOver
