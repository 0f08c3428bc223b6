"""Greedy tokens equal transformers' for the same weights, whatever the ranks, batches, chunks and blocks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.proto.step import RowSampling

GREEDY = RowSampling(temperature=0.0)

# Two float32 evaluations of these models differ by about 1e-5 in a logit; two tokens nearer than this are a tie.
NEAR_TIE = 5e-5

KINDS = {
    "llama": {},
    "llama-tied-biased": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 8,
    },
    "llama-rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-odd-vocabulary": {"vocab_size": 387, "num_key_value_heads": 8},
}


class Reference:
    """transformers' model of the same folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
        return out[0, len(prompt) :].tolist()

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


@pytest.fixture(scope="module")
def references(make_model: Any) -> dict[str, tuple[Path, Reference]]:
    folders = {name: make_model(name.split("-")[0], seed=7, **overrides) for name, overrides in KINDS.items()}
    return {name: (folder, Reference(folder)) for name, folder in folders.items()}


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 380, length).tolist() for length in lengths]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_single_requests(kind: str, tp: int, references: Any, make_engine: Any, planned: Any) -> None:
    folder, reference = references[kind]
    engine = make_engine(folder, tp)
    for prompt in prompts_of([5, 33], seed=6):
        sequence = planned(prompt, 20, GREEDY)
        engine.generate([sequence], chunk_len=16)
        reference.check_generate(prompt, sequence.generated)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_batch_equals_transformers(
    kind: str, tp: int, references: Any, make_engine: Any, planned: Any
) -> None:
    folder, reference = references[kind]
    engine = make_engine(folder, tp, block_size=8, max_num_seqs=4)
    # Around the borders of blocks of 8 and chunks of 20, more sequences than rows, arriving while others decode.
    lengths = [1, 7, 8, 9, 19, 20, 21, 41, 60]
    sequences = [
        planned(prompt, 12 + 3 * index, GREEDY, arrival=index)
        for index, prompt in enumerate(prompts_of(lengths, seed=1))
    ]
    engine.generate(sequences, chunk_len=20)
    for sequence in sequences:
        reference.check_greedy(sequence.prompt, sequence.generated)


@pytest.fixture(scope="module")
def demo_reference(demo_model_dir: Path) -> Reference:
    return Reference(demo_model_dir)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_single_requests_of_the_demo_model(
    demo_model_dir: Path, demo_reference: Reference, tp: int, make_engine: Any, planned: Any
) -> None:
    engine = make_engine(demo_model_dir, tp)
    for prompt in prompts_of([3, 16, 40], seed=2):
        sequence = planned(prompt, 24, GREEDY)
        engine.generate([sequence], chunk_len=16)
        demo_reference.check_generate(sequence.prompt, sequence.generated)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_mixed_batch_of_the_demo_model(
    demo_model_dir: Path, demo_reference: Reference, tp: int, make_engine: Any, planned: Any
) -> None:
    engine = make_engine(demo_model_dir, tp, max_num_seqs=8)
    sequences = [planned(prompt, 20, GREEDY) for prompt in prompts_of([2, 15, 16, 17, 33, 50], seed=3)]
    engine.generate(sequences, chunk_len=17)
    for sequence in sequences:
        demo_reference.check_generate(sequence.prompt, sequence.generated)


def test_every_split_of_a_prompt_gives_the_same_tokens(
    references: Any, make_engine: Any, planned: Any
) -> None:
    folder, reference = references["llama"]
    engine = make_engine(folder, 1, block_size=4)
    prompt = prompts_of([23], seed=4)[0]
    for chunk_len in range(1, 24):
        sequence = planned(prompt, 8, GREEDY)
        engine.generate([sequence], chunk_len=chunk_len, seed=chunk_len)
        reference.check_greedy(prompt, sequence.generated)


def test_the_random_models_wander(references: Any) -> None:
    """The other tests could not fail with a model that repeats one token."""
    for name, (_, reference) in references.items():
        generated = reference.generate(prompts_of([5, 33], seed=6)[0], 20)
        assert len(set(generated)) > 8, f"{name}: {generated}"
