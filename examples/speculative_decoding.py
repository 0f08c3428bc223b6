"""Speculative decoding: same output, fewer steps. `python examples/speculative_decoding.py [MODEL]`."""

from __future__ import annotations

import sys

from quire import LLM, SamplingParams

PROMPT = "One ring of the bell, two rings of the bell, three rings of the bell, four"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    texts = []
    configs: list[dict[str, object] | None] = [None, {"method": "ngram", "num_speculative_tokens": 4}]
    if model == "demo":
        configs.append({"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3})
        configs.append({"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3})
    for speculative_config in configs:
        with LLM(model, num_kv_blocks=256, speculative_config=speculative_config) as llm:
            (output,) = llm.generate([PROMPT], GREEDY)
        texts.append(output.outputs[0].text)
    print(f"{PROMPT!r} -> {texts[0]!r}")
    print("same text with drafts" if len({*texts}) == 1 else "the texts differ")


if __name__ == "__main__":
    main()
