"""A custom logits processor: `pip install examples/logits_processor`, then this program with a MODEL."""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    plain = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    even = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, extra_args={"even_tokens": {"bias": 1000}}
    )
    with LLM(model, num_kv_blocks=256, logits_processors="even_tokens") as llm:
        for output in llm.generate(["It was a dark night"] * 2, [plain, even]):
            print(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
