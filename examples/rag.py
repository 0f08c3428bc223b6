"""Retrieval-augmented generation with one model. `python examples/rag.py [MODEL [QUESTION]]`.

The model embeds passages and a question, and answers from the passages that are nearest to it. For good passages and
answers take a model of some billion parameters, and an embedder beside it; the bundled one only shows the calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire import LLM, SamplingParams

PASSAGES = (
    "The captain sails the ship to the islands.",
    "It rains on the fields in the north.",
    "There is bread and cheese in the kitchen.",
    "The letter lies on the table by the window.",
)
QUESTION = "Who sails the ship?"
NUM_SOURCES = 2
Vectors = npt.NDArray[np.float32]


def embed(llm: LLM, texts: Sequence[str]) -> Vectors:
    """Return the embeddings, one per row. They are normalized, so that their product is the cosine."""
    return np.array([output.outputs.embedding for output in llm.embed(list(texts))], np.float32)


def answer(llm: LLM, question: str, sources: Sequence[str]) -> str:
    prompt = "\n".join([*sources, f"Question: {question}", "Answer:"])
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0))
    return output.outputs[0].text.strip()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    question = sys.argv[2] if len(sys.argv) > 2 else QUESTION
    with LLM(model, runner="both", num_kv_blocks=256) as llm:
        index = embed(llm, PASSAGES)
        (scores,) = embed(llm, [question]) @ index.T
        nearest = [int(number) for number in np.argsort(-scores)[:NUM_SOURCES]]
        for number in nearest:
            print(f"source {scores[number]:+.3f} {PASSAGES[number]}")
        print(f"answer: {answer(llm, question, [PASSAGES[number] for number in nearest])}")


if __name__ == "__main__":
    main()
