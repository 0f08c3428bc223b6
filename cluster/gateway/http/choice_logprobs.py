"""Log-probabilities of tokens in OpenAI's two forms: of completions, and of chat completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...text.requests.outputs import Logprob, PositionLogprobs, RequestOutput, most_likely
from ...text.requests.tokenizer import Tokenizer
from .json_text import JsonItems

# Stands for minus infinity, which JSON lacks; as OpenAI's API.
LEAST = -9999.0


def json_logprob(logprob: float) -> float:
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


class CompletionLogprobs:
    """Log-probabilities of one completion, with the offset of each token in the text.

    Args:
        num_top: most likely tokens that were asked for.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = 0

    def of_tokens(self, token_ids: list[int], entries: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """Return the next tokens' part; an entry is None for the first token of a prompt."""
        texts = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            chosen.append(None if entry is None else json_logprob(entry[token_id].logprob))
            top.append(None if entry is None else self._top(entry))
        return {
            "tokens": texts,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(self, entry: PositionLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in most_likely(entry, self._num_top):
            top.setdefault(self._tokenizer.token_text(token_id), json_logprob(logprob.logprob))
        return top


def num_logprobs(output: RequestOutput) -> int:
    """Return about the number of log-probabilities; each completion may repeat those of the prompt."""
    of_prompt = num_of_entries(output.prompt_logprobs or ())
    return sum(of_prompt + num_of_entries(completion.logprobs or ()) for completion in output.outputs)


def num_of_entries(entries: Sequence[PositionLogprobs | None]) -> int:
    """Return about the number of log-probabilities of positions, all of which have as many as the last one."""
    return len(entries) * len(entries[-1] or ()) if entries else 0


def join_logprobs(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the parts of one completion as a whole; None if there are none."""
    return {name: [each for part in parts for each in part[name]] for name in parts[0]} if parts else None


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], entries: list[PositionLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """Return the entries of ``logprobs.content``."""
    return [
        {
            **_entry(tokenizer, token_id, entry[token_id]),
            "top_logprobs": [_entry(tokenizer, top_id, top) for top_id, top in most_likely(entry, num_top)],
        }
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: Logprob) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": json_logprob(logprob.logprob), "bytes": list(text.encode())}


def prompt_logprobs_json(tokenizer: Tokenizer, entries: Sequence[PositionLogprobs | None]) -> JsonItems:
    """Return vLLM's ``prompt_logprobs``: token id |-> log-probability, rank and text, None for the first token."""
    return JsonItems(
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": json_logprob(logprob.logprob),
                "rank": logprob.rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for token_id, logprob in entry.items()
        }
        for entry in entries
    )
