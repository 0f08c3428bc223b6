"""What transformers generates for a model directory, to compare with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

# Logits of these models in float32 are off those in float64 by up to 4e-5 in quire and 5e-5 in transformers (measured
# over all kinds of test_exactness). Two tokens change places where they are nearer than twice the sum.
NEAR_TIE = 2e-4


class Reference:
    """transformers' model of the same folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        # Experts one by one: in one call they can neither be float64 nor of any size.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        self._generated: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy tokens; kept, as the same prompts are asked for at each number of ranks."""
        kept = self._generated.get(tuple(prompt), [])
        if len(kept) < max_tokens:
            kept = self._generated[tuple(prompt)] = self._generate(prompt, max_tokens)
        return kept[:max_tokens]

    @torch.inference_mode()
    def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        generated: list[int] = out[0, len(prompt) :].tolist()
        return generated

    def check_generate(self, prompt: list[int], generated: list[int]) -> None:
        """Fails unless `generated` is what transformers generates, up to a proven near-tie."""
        expected = self.generate(prompt, len(generated))
        for place, (ours, theirs) in enumerate(zip(generated, expected, strict=True)):
            if ours != theirs:
                self._check_near_tie(prompt + generated[:place], ours, theirs)
                return  # the texts go on differently from here

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], generated: list[int]) -> None:
        """Fails unless each token is the likeliest after those before it, up to proven near-ties.

        This holds exactly if `generated` is the greedy continuation, and takes one forward pass to see.
        """
        logits = self.model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        for place, (ours, theirs) in enumerate(zip(generated, logits.argmax(dim=-1).tolist(), strict=True)):
            if ours != theirs:
                self._check_near_tie(prompt + generated[:place], ours, theirs)

    @torch.inference_mode()
    def _check_near_tie(self, tokens: list[int], ours: int, theirs: int) -> None:
        """Fails unless the logits of two next tokens are nearer than noise, in float64."""
        logits = self.model.double()(torch.tensor([tokens])).logits[0, -1]
        self.model.float()
        gap = abs(float(logits[ours] - logits[theirs]))
        assert gap < NEAR_TIE, (
            f"after {len(tokens)} tokens: {ours}, expected {theirs}; their logits differ by {gap}"
        )


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 380, length).tolist() for length in lengths]
