"""LangChain's chat model of OpenAI's API."""

from __future__ import annotations

from typing import Any

from client_operations import MODEL, QUESTION, TOOL, TOOL_CALL_ID, TOOL_RESULT, TextAndCalls, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


class LangChainClient:
    def __init__(self, url: str) -> None:
        self._url = url
        self._model = self._chat_model(MODEL)
        self._model_with_tools = self._model.bind_tools([TOOL])

    def chat(self) -> tuple[str, int]:
        message = self._model.invoke(QUESTION)
        return message.content, message.usage_metadata["output_tokens"]

    def stream(self) -> list[str]:
        return [chunk.content for chunk in self._model.stream(QUESTION) if chunk.content]

    def tools(self) -> TextAndCalls:
        return _text_and_calls(self._model_with_tools.invoke(QUESTION))

    def streamed_tools(self) -> TextAndCalls:
        first, *chunks = self._model_with_tools.stream(QUESTION)
        return _text_and_calls(sum(chunks, first))

    def tool_result(self) -> str:
        call = {"name": "now", "args": {}, "id": TOOL_CALL_ID}
        asked = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call])]
        message = self._model_with_tools.invoke([*asked, ToolMessage(TOOL_RESULT, tool_call_id=TOOL_CALL_ID)])
        return str(message.content)

    def unknown_model(self) -> str:
        try:
            self._chat_model("other").invoke(QUESTION)
        except Exception as error:
            return type(error).__name__
        return ""

    def _chat_model(self, model: str) -> Any:
        return ChatOpenAI(model=model, base_url=self._url, api_key="none", max_retries=0, stream_usage=True)


def _text_and_calls(message: Any) -> TextAndCalls:
    return message.content, [(call["name"], call["args"]) for call in message.tool_calls]


if __name__ == "__main__":
    run(LangChainClient)
