"""Reference: greedy tokens of transformers for a model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

# float32 logits differ from float64 ones by up to 4e-5 in quire and 5e-5 in transformers (measured over all kinds of
# test_exactness). Two tokens may swap ranks if their logits differ by less than twice the sum.
NEAR_TIE = 2e-4


class Reference:
    """The model of a folder in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        # Eager experts: the grouped implementation supports neither float64 nor all sizes.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        self._folder = folder
        self._generated: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return greedy tokens; cached, since tests repeat prompts for each number of ranks."""
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
        """Assert that `generated` equals the tokens of transformers, up to a verified near-tie."""
        expected = self.generate(prompt, len(generated))
        for place, (ours, theirs) in enumerate(zip(generated, expected, strict=True)):
            if ours != theirs:
                self._check_near_tie(prompt + generated[:place], ours, theirs)
                return  # the continuations differ from here on

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], generated: list[int]) -> None:
        """Assert that each token is the most likely one after its prefix, up to verified near-ties.

        This is equivalent to `generated` being the greedy continuation, and takes one forward pass.
        """
        logits = self.model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        for place, (ours, theirs) in enumerate(zip(generated, logits.argmax(dim=-1).tolist(), strict=True)):
            if ours != theirs:
                self._check_near_tie(prompt + generated[:place], ours, theirs)

    def check_greedy_text(self, prompt: str, generated: Sequence[int]) -> None:
        """As `check_greedy`, for a prompt that the tokenizer of the model encodes."""
        from transformers import AutoTokenizer

        prompt_ids = AutoTokenizer.from_pretrained(self._folder)(prompt).input_ids
        self.check_greedy(prompt_ids, list(generated))

    @torch.inference_mode()
    def _check_near_tie(self, tokens: list[int], ours: int, theirs: int) -> None:
        """Assert that the float64 logits of two tokens differ by less than NEAR_TIE."""
        logits = self.model.double()(torch.tensor([tokens])).logits[0, -1]
        self.model.float()
        gap = abs(float(logits[ours] - logits[theirs]))
        assert gap < NEAR_TIE, (
            f"after {len(tokens)} tokens: {ours}, expected {theirs}; their logits differ by {gap}"
        )


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 380, length).tolist() for length in lengths]
