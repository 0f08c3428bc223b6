"""Fixtures for all tests: small models on disk, built once a session, and the bundled demo model.

Heavy libraries are imported where they are used, so that tests of the control plane start at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Nothing in the tests may look for a network; transformers would, for files that a tiny model lacks.
os.environ["HF_HUB_OFFLINE"] = "1"

ModelFactory = Callable[..., Path]

END_OF_TEXT = "<|endoftext|>"

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "A gathering of folded pages is called a quire; many quires make a book.",
    "What's past is prologue: twenty-seven ships, 1,024 sails and a naïve crew — all gone!",
]


def pytest_configure() -> None:
    """A shell starts what it puts in the background with Ctrl-C ignored, and child processes would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """`make_model(kind="llama", seed=0, **overrides) -> Path`: a tiny random model directory with a tokenizer.

    Kinds: llama, mistral, qwen2, qwen3. Overrides are fields of transformers' configuration of that kind.
    The same arguments give the same directory, which tests must leave as it is (copy it to change it).
    """
    built: dict[str, Path] = {}

    def make(kind: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = repr((kind, seed, sorted(overrides.items())))
        if key not in built:
            built[key] = _build_model(tmp_path_factory.mktemp(f"{kind}-{seed}-"), kind, seed, overrides)
        return built[key]

    return make


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The model that is bundled with the package."""
    import quire.cluster.demo

    folder = Path(quire.cluster.demo.__file__).parent / "model"
    assert (folder / "config.json").is_file(), f"the bundled demo model is missing from {folder}"
    return folder


def _build_model(folder: Path, kind: str, seed: int, overrides: dict[str, Any]) -> Path:
    import torch
    import transformers

    tokenizer = _train_tokenizer()
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    defaults: dict[str, Any] = TINY | {"vocab_size": len(tokenizer)} | _KIND_DEFAULTS.get(kind, {})
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model = model_class(config_class(**(defaults | tokens | overrides))).to(torch.float32)
    _randomise(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_KIND_DEFAULTS: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}}


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights with which greedy decoding wanders: the usual small ones make a model that repeats one token."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    head_std = 2 / model.config.hidden_size**0.5
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            sharpness = 2.0 if name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm") else 1.0
            if name.endswith("norm.weight"):
                weight.copy_(sharpness + normal(weight, 0.1))
            elif weight.ndim == 1:
                weight.copy_(normal(weight, 0.1))
            elif "embed_tokens" in name:
                weight.copy_(normal(weight, head_std if model.config.tie_word_embeddings else 0.05))
            elif "lm_head" in name:
                weight.copy_(normal(weight, head_std))
            else:
                weight.copy_(normal(weight, sharpness * weight.shape[1] ** -0.5))


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 384 tokens at most, the end-of-text token included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
