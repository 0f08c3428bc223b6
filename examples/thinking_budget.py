"""Reasoning of at most so many tokens. `python examples/thinking_budget.py`."""

from __future__ import annotations

from quire import LLM, SamplingParams

# A model that reasons has such a template; this one lets the demo model begin with reasoning.
TEMPLATE = "{{ messages[0].content }}<think>"
BUDGETS = [None, 24, 6]


def main() -> None:
    messages = [{"role": "user", "content": "It was"}]
    with LLM("demo", chat_template=TEMPLATE, reasoning_parser="qwen3", num_kv_blocks=256) as llm:
        tokenizer = llm.get_tokenizer()
        for budget in BUDGETS:
            params = SamplingParams(max_tokens=48, temperature=0.0, thinking_token_budget=budget)
            (output,) = llm.chat(messages, params)
            message = output.outputs[0].message
            assert message is not None
            num_tokens = len(tokenizer.encode(message.reasoning_content or ""))
            print(f"budget {budget}: {num_tokens} tokens of reasoning, answer {message.content!r}")


if __name__ == "__main__":
    main()
