"""Embeddings: rank texts by a question, with any model as embedder. `python examples/embeddings.py [MODEL]`.

Use a model that was trained for it, for example Qwen/Qwen3-Embedding-0.6B; the bundled one only shows the calls.
"""

from __future__ import annotations

import sys

from quire import LLM

QUESTION = "Who sails the ship?"
TEXTS = ["The captain sails the ship.", "It rains on the fields.", "Bread and cheese for all."]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with LLM(model, runner="pooling", num_kv_blocks=256) as llm:
        (question,) = llm.embed(QUESTION)
        print(f"{question.outputs.hidden_size} dimensions")
        scores = llm.score(QUESTION, TEXTS)
    ranked = sorted(zip(TEXTS, scores, strict=True), key=lambda pair: -pair[1].outputs.score)
    for text, score in ranked:
        print(f"{score.outputs.score:+.3f} {text}")


if __name__ == "__main__":
    main()
