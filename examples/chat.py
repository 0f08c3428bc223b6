"""Hold a conversation offline, with the model's own chat template: `python examples/chat.py MODEL`."""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams

QUESTIONS = ["What is a paged KV cache?", "And why are its blocks shared?"]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(
            "usage: python examples/chat.py MODEL, a model directory whose tokenizer has a chat template"
        )
    sampling_params = SamplingParams(max_tokens=32, temperature=0.0)
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    with LLM(sys.argv[1], num_kv_blocks=256) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (output,) = llm.chat(messages, sampling_params)
            reply = output.outputs[0].text
            messages.append({"role": "assistant", "content": reply})
            print(f"user: {question}\nassistant: {reply}")


if __name__ == "__main__":
    main()
