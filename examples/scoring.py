"""Scores of given texts: the likelier answer, and perplexity. `python examples/scoring.py [MODEL]`."""

from __future__ import annotations

import math
import sys

from quire import LLM, RequestOutput, SamplingParams

QUESTION = "The ship was steered by"
ANSWERS = [" the captain.", " the refrigerator."]
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."
SCORING = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)


def logprobs_of(output: RequestOutput) -> list[float]:
    """Return the log-probability of each token of the prompt but the first."""
    assert output.prompt_logprobs is not None
    assert output.prompt_token_ids is not None
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return [entry[token_id].logprob for entry, token_id in pairs if entry is not None]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with LLM(model, num_kv_blocks=256) as llm:
        num_shared = len(llm.get_tokenizer().encode(QUESTION))
        texts = [QUESTION + answer for answer in ANSWERS] + [TEXT]
        *answers, whole = (logprobs_of(output) for output in llm.generate(texts, SCORING))
    for answer, logprobs in zip(ANSWERS, answers, strict=True):
        own = logprobs[num_shared - 1 :]
        print(f"{sum(own) / len(own):+.2f} per token:{answer}")
    print(f"perplexity {math.exp(-sum(whole) / len(whole)):.1f}: {TEXT}")


if __name__ == "__main__":
    main()
