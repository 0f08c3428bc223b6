"""LlamaIndex's model of servers with OpenAI's API."""

from __future__ import annotations

from typing import Any

from client_operations import MODEL, QUESTION, TOOL, TOOL_CALL_ID, TOOL_RESULT, TextAndCalls, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


class LlamaIndexClient:
    def __init__(self, url: str) -> None:
        self._url = url
        self._model = self._chat_model(MODEL)
        self._question = ChatMessage(role="user", content=QUESTION)

    def chat(self) -> tuple[str, int]:
        response = self._model.chat([self._question])
        return response.message.content, response.raw.usage.completion_tokens

    def stream(self) -> list[str]:
        return [chunk.delta for chunk in self._model.stream_chat([self._question]) if chunk.delta]

    def tools(self) -> TextAndCalls:
        return _text_and_calls(self._model, self._model.chat([self._question], tools=[TOOL]))

    def streamed_tools(self) -> TextAndCalls:
        *_, last = self._model.stream_chat([self._question], tools=[TOOL])
        return _text_and_calls(self._model, last)

    def tool_result(self) -> str:
        call = {"id": TOOL_CALL_ID, "type": "function", "function": {"name": "now", "arguments": "{}"}}
        asked = ChatMessage(role="assistant", content=None, additional_kwargs={"tool_calls": [call]})
        result = ChatMessage(
            role="tool", content=TOOL_RESULT, additional_kwargs={"tool_call_id": TOOL_CALL_ID}
        )
        response = self._model.chat([self._question, asked, result], tools=[TOOL])
        return str(response.message.content)

    def unknown_model(self) -> str:
        try:
            self._chat_model("other").chat([self._question])
        except Exception as error:
            return type(error).__name__
        return ""

    def _chat_model(self, model: str) -> Any:
        return OpenAILike(
            model=model,
            api_base=self._url,
            api_key="none",
            max_retries=0,
            is_chat_model=True,
            is_function_calling_model=True,
        )


def _text_and_calls(model: Any, response: Any) -> TextAndCalls:
    calls = model.get_tool_calls_from_response(response)
    return response.message.content, [(call.tool_name, dict(call.tool_kwargs)) for call in calls]


if __name__ == "__main__":
    run(LlamaIndexClient)
