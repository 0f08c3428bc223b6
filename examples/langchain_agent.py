"""A LangChain agent with tools: `pip install langchain-openai`, then `python langchain_agent.py URL MODEL`

The model must know tool calls, as Qwen3 does; quire finds their format from its chat template. The agent asks the
model, runs the tools that it calls, returns their results, and ends with its answer.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

MAX_TURNS = 6


@tool
def current_time() -> str:
    """Return the present date and time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


TOOLS = {each.name: each for each in (current_time, multiply)}


def answer(question: str, url: str, model: str) -> str:
    """Return the agent's answer. Prints each call of a tool."""
    llm = ChatOpenAI(model=model, base_url=url, api_key="none").bind_tools(list(TOOLS.values()))
    messages: list[HumanMessage | AIMessage | ToolMessage] = [HumanMessage(question)]
    for _ in range(MAX_TURNS):
        reply = llm.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            return str(reply.content)
        for call in reply.tool_calls:
            chosen = TOOLS.get(call["name"])
            result = f"there is no tool {call['name']}" if chosen is None else chosen.invoke(call["args"])
            print(f"{call['name']}({call['args']}) -> {result}")
            messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
    return f"no answer after {MAX_TURNS} turns"


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    model = sys.argv[2] if len(sys.argv) > 2 else "demo"
    print(answer("What is 12.5 times 8?", url, model))


if __name__ == "__main__":
    main()
