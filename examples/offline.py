"""Generate offline: several prompts in one batch, with log-probabilities. `python examples/offline.py [MODEL]`."""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams

PROMPTS = ["It was a dark night, and", "Call me", "The captain looked at the sea and said:"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    sampling_params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7, logprobs=0)
    with LLM(model, num_kv_blocks=256) as llm:
        for output in llm.generate(PROMPTS, sampling_params):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r}")
            print(f"  {completion.finish_reason}, log-probability {completion.cumulative_logprob:.2f}")


if __name__ == "__main__":
    main()
