"""Greedy: checks that an output is a greedy continuation, with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Logits differ by this much between batches or after a recomputation; tokens within it are ties.
TIE = 1e-4


class Greedy:
    """A model on a CPU in float32."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def check(self, prompt: str, output: Sequence[int]) -> None:
        """Assert that each token is the most likely one after its prefix, or tied with it."""
        import torch

        prompt_ids = self._tokenizer(prompt, return_tensors="pt").input_ids
        # One pass over the whole output.
        with torch.inference_mode():
            tokens = torch.cat([prompt_ids, torch.tensor([list(output)])], dim=1)
            logits = self._model(tokens).logits[0, prompt_ids.shape[1] - 1 : -1]
        chosen = logits.gather(1, torch.tensor(list(output)).unsqueeze(1)).squeeze(1)
        gaps = logits.amax(dim=1) - chosen
        assert gaps.max() < TIE, (
            f"token {gaps.argmax()} of the output to {prompt!r} is not the most likely: logit gap {gaps.max()}"
        )
