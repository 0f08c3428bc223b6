"""Rollouts, other weights, and sleep. `python examples/reinforcement_learning.py [MODEL]`."""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams

SAMPLING = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0, detokenize=False)
PROMPT = [5, 6, 7]  # token ids in, token ids out


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with LLM(model, num_kv_blocks=256) as llm:
        for step in range(2):
            (output,) = llm.generate([PROMPT], SAMPLING)
            (completion,) = output.outputs
            version = completion.weights_version or "initial"
            print(f"{version}: {completion.token_ids}, log-probability {completion.cumulative_logprob:.2f}")
            llm.sleep()  # a trainer would take the memory here, and write its weights
            llm.wake_up()
            llm.update_weights(llm.config.model.path, version=f"step-{step + 1}")


if __name__ == "__main__":
    main()
