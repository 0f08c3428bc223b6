"""ResponseBuilder: the items of a /v1/responses response, and the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ....proto.errors import QuireError
from ...text.chat_format.deltas import ChatDelta, ContentDelta, ReasoningDelta, ToolCallStart
from ...text.requests.outputs import CompletionDelta, CompletionFinished, StreamEvent, Usage
from ..generation.generation import Generation
from .completion_objects import TokenLogprob, chat_logprobs, version_json
from .errors import openai_error
from .json_bodies import ResponseHead, json_bytes
from .schema.response_request import ResponseRequest

Item = dict[str, Any]

# Fields of a request that its response has as they are.
_ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "service_tier", "temperature", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip


class ResponseBuilder:
    """Collects the completion of one conversation as items: reasoning, message and function calls.

    Attributes:
        response: the response so far; complete after the last event.
    """

    def __init__(self, head: ResponseHead, body: ResponseRequest, generation: Generation) -> None:
        self.response = _response(head, body, generation.model_name)
        self._generation = generation
        # Of the tokens since the last text, reasoning or call.
        self._logprobs: list[TokenLogprob] = []
        self._item: Item | None = None  # the last item, until it is complete
        self._num_events = 0
        self._is_running = False

    def queued(self) -> bytes:
        """Return the first events of a response that has begun before its first token."""
        self.response["status"] = "queued"
        return self._event("response.created", response=self.response) + self._event(
            "response.queued", response=self.response
        )

    def event(self, event: StreamEvent) -> bytes:
        """Add an event of the completion; return its events of the stream."""
        if isinstance(event, CompletionDelta):
            if event.logprobs:
                sampling, tokenizer = self._generation.request.sampling, self._generation.model.tokenizer
                num_top = sampling.logprobs or 0
                self._logprobs += chat_logprobs(tokenizer, event.token_ids, event.logprobs, num_top)
            return self._begin() + b"".join([self._delta(part) for part in event.chat or ()])
        if isinstance(event, CompletionFinished):
            return self._begin() + self._finish(event)
        return b""

    def failed(self, error: QuireError) -> bytes:
        """Return the last event of a stream that has begun.

        It is OpenAI's event `error` for readers of events; the member `error` is what OpenAI's packages raise.
        """
        details = json.loads(openai_error(error))["error"]
        self._break_off("failed")
        self.response["error"] = {name: details[name] for name in ("code", "message")}
        return self._event(
            "error", **{name: details[name] for name in ("code", "message", "param")}, error=details
        )

    def cancel(self) -> None:
        """Let the response end as it is."""
        self._break_off("cancelled")

    @property
    def has_begun(self) -> bool:
        """The stream has an event."""
        return bool(self._num_events)

    def _begin(self) -> bytes:
        """Return the first events of a stream, once, with the first token: before it the request may be refused."""
        if self._is_running:
            return b""
        self._is_running = True
        self.response["status"] = "in_progress"
        created = b"" if self._num_events else self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def _delta(self, delta: ChatDelta) -> bytes:
        logprobs, self._logprobs = self._logprobs, []
        if isinstance(delta, ToolCallStart):
            call = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            return self._start_item("function_call", "fc", **call)
        if isinstance(delta, ContentDelta):
            return self._text_delta("message", "output_text", delta.text, {"logprobs": logprobs})
        if isinstance(delta, ReasoningDelta):
            return self._text_delta("reasoning", "reasoning_text", delta.text, {})
        assert self._item is not None, "arguments follow the start of their call"
        self._item["arguments"] += delta.text
        return self._event("response.function_call_arguments.delta", **self._place, delta=delta.text)

    def _text_delta(self, kind: str, part_kind: str, text: str, extra: Item) -> bytes:
        started = b""
        if self._item is None or self._item["type"] != kind:
            started = self._start_text(kind, part_kind)
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        for name, values in extra.items():
            part[name] += values
        return started + self._event(
            f"response.{part_kind}.delta", **self._place, content_index=0, delta=text, **extra
        )

    def _start_text(self, kind: str, part_kind: str) -> bytes:
        part: Item = {"type": part_kind, "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            started = self._start_item(kind, "msg", role="assistant", content=[])
        else:
            started = self._start_item(kind, "rs", summary=[], content=[])
        assert self._item is not None
        self._item["content"].append(part)
        return started + self._event(
            "response.content_part.added", **self._place, content_index=0, part=dict(part)
        )

    def _start_item(self, kind: str, prefix: str, **members: Any) -> bytes:
        ended = self._end_item("completed")
        output: list[Item] = self.response["output"]
        item_id = f"{prefix}_{self.response['id'].removeprefix('resp_')}_{len(output)}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **members}
        output.append(self._item)
        return ended + self._event(
            "response.output_item.added", output_index=len(output) - 1, item=self._item
        )

    def _end_item(self, status: str) -> bytes:
        item = self._item
        if item is None:
            return b""
        item["status"] = status
        place, self._item = self._place, None
        done = self._end_parts(item, place)
        return done + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _end_parts(self, item: Item, place: Item) -> bytes:
        if item["type"] == "function_call":
            arguments = item["arguments"]
            return self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=arguments
            )
        part = item["content"][0]
        extra = {name: part[name] for name in ("logprobs",) if name in part}
        return self._event(
            f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **extra
        ) + self._event("response.content_part.done", **place, content_index=0, part=part)

    def _break_off(self, status: str) -> None:
        self.response["status"] = status
        if self._item is not None:
            self._item["status"] = "incomplete"

    def _finish(self, event: CompletionFinished) -> bytes:
        is_cut = event.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        ended = self._end_item(status)
        self.response["status"] = status
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = _usage(event.usage)
        self.response |= version_json(event)
        return ended + self._event(f"response.{status}", response=self.response)

    @property
    def _place(self) -> Item:
        """The item that an event is about."""
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _event(self, kind: str, **members: Any) -> bytes:
        data = json_bytes({"type": kind, "sequence_number": self._num_events, **members})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def assistant_message(response: Item) -> Item:
    """Return the items of a response as one message of a conversation."""
    message: Item = {"role": "assistant"}
    for item in response["output"]:
        if item["type"] == "message":
            message["content"] = message.get("content", "") + item["content"][0]["text"]
        elif item["type"] == "reasoning":
            message["reasoning_content"] = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    if len(message) == 1:
        message["content"] = ""
    return message


def message_items(response_id: str, messages: Sequence[Item]) -> Iterator[Item]:
    """Yield messages of a conversation as items: the opposite of `ResponseRequest.messages`."""
    number = count()

    def item(kind: str, prefix: str, **members: Any) -> Item:
        item_id = f"{prefix}_{response_id.removeprefix('resp_')}_in_{next(number)}"
        return {"id": item_id, "type": kind, "status": "completed", **members}

    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "tool":
            call_id = message.get("tool_call_id")
            yield item("function_call_output", "fco", call_id=call_id, output=content)
            continue
        if reasoning := message.get("reasoning_content"):
            parts = [{"type": "reasoning_text", "text": reasoning}]
            yield item("reasoning", "rs", summary=[], content=parts)
        if content is not None:
            kind = "output_text" if role == "assistant" else "input_text"
            part: Item = {"type": kind, "text": content}
            if role == "assistant":
                part["annotations"] = []
            yield item("message", "msg", role=role, content=[part])
        for call in message.get("tool_calls", ()):
            yield item("function_call", "fc", call_id=call["id"], **call["function"])


def _response(head: ResponseHead, body: ResponseRequest, model: str) -> Item:
    return {
        "id": head.id,
        "object": "response",
        "background": body.background is True,
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": body.keeps,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        **{name: getattr(body, name) for name in _ECHOED},
        "usage": None,
    }


def _usage(usage: Usage) -> Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
