"""Greedy: whether an answer is one that greedy decoding gives, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Sums of another batch, or after a recomputation, differ by so much; the tokens that it decides between are equals.
TIE = 1e-4


class Greedy:
    """A model on the CPU, in float32."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def check(self, prompt: str, answer: Sequence[int]) -> None:
        """Raises AssertionError unless each token is the best one after all before it, or as good."""
        import torch

        prompt_ids = self._tokenizer(prompt, return_tensors="pt").input_ids
        # One pass over the whole answer.
        with torch.inference_mode():
            tokens = torch.cat([prompt_ids, torch.tensor([list(answer)])], dim=1)
            logits = self._model(tokens).logits[0, prompt_ids.shape[1] - 1 : -1]
        chosen = logits.gather(1, torch.tensor(list(answer)).unsqueeze(1)).squeeze(1)
        gaps = logits.amax(dim=1) - chosen
        assert gaps.max() < TIE, (
            f"token {gaps.argmax()} of the answer to {prompt!r} is not the best: {gaps.max()}"
        )
