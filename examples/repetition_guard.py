"""A guard that ends outputs which repeat themselves. `python examples/repetition_guard.py [MODEL]`."""

from __future__ import annotations

import sys

from quire import LLM, RepetitionDetectionParams, SamplingParams

PROMPTS = ["It was", "Call me Ishmael.", "The sea was"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    # A pattern of at most 40 tokens that occurs four times in succession ends an output.
    guard = RepetitionDetectionParams(max_pattern_size=40, min_count=4)
    with LLM(model, num_kv_blocks=256) as llm:
        for repetition_detection in (None, guard):
            params = SamplingParams(
                max_tokens=200, temperature=0.0, repetition_detection=repetition_detection
            )
            outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
            num_tokens = sum(len(output.token_ids) for output in outputs)
            reasons = ", ".join(str(output.finish_reason) for output in outputs)
            print(f"{'with' if repetition_detection else 'without'} a guard: {num_tokens} tokens ({reasons})")


if __name__ == "__main__":
    main()
