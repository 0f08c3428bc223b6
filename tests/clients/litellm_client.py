"""litellm's client of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import litellm
from client_operations import MODEL, QUESTION, TOOL, TOOL_CALL_ID, TOOL_RESULT, TextAndCalls, run

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class LitellmClient:
    def __init__(self, url: str) -> None:
        self._url = url

    def chat(self) -> tuple[str, int]:
        response = self._complete(MESSAGES)
        return response.choices[0].message.content, response.usage.completion_tokens

    def stream(self) -> list[str]:
        texts = [chunk.choices[0].delta.content for chunk in self._complete(MESSAGES, stream=True)]
        return [text for text in texts if text]

    def tools(self) -> TextAndCalls:
        return _text_and_calls(self._complete(MESSAGES, tools=[TOOL]))

    def streamed_tools(self) -> TextAndCalls:
        chunks = list(self._complete(MESSAGES, tools=[TOOL], stream=True))
        return _text_and_calls(litellm.stream_chunk_builder(chunks, messages=MESSAGES))

    def tool_result(self) -> str:
        call = {"id": TOOL_CALL_ID, "type": "function", "function": {"name": "now", "arguments": "{}"}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": TOOL_CALL_ID, "content": TOOL_RESULT}
        response = self._complete([*MESSAGES, asked, result], tools=[TOOL])
        return str(response.choices[0].message.content)

    def unknown_model(self) -> str:
        try:
            self._complete(MESSAGES, model="other")
        except Exception as error:
            return type(error).__name__
        return ""

    def _complete(self, messages: list[Any], *, model: str = MODEL, **options: Any) -> Any:
        return litellm.completion(
            f"openai/{model}", messages, api_base=self._url, api_key="none", max_retries=0, **options
        )


def _text_and_calls(response: Any) -> TextAndCalls:
    message = response.choices[0].message
    functions = [call.function for call in message.tool_calls]
    return message.content, [(each.name, json.loads(each.arguments)) for each in functions]


if __name__ == "__main__":
    run(LitellmClient)
