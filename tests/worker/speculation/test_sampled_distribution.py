"""Drafts leave the distribution of sampled tokens unchanged, whatever proposes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chi_square import assert_chi_square
from draft_heads import add_mtp, write_eagle3
from quick_cases import slow_except
from ranked_driver import RankedDriver

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.config import SpeculativeConfig
from quire.worker.speculation import draft_model, head_proposer

# The sampled tokens follow in the prompt on each other, so that repeated text is drafted as well.
ALLOWED = (5, 6, 7)
PROMPT = [5, 6, 7, 7, 6, 5, 5, 7, 6, 6, 5, 7, 5, 6]
NUM_TOKENS, NUM_SEQUENCES, TEMPERATURE = 4, 1200, 1.3


@pytest.fixture(scope="module")
def target(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def expected(target: Path) -> torch.Tensor:
    """The probability of each continuation by transformers, [len(ALLOWED)] * NUM_TOKENS."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    continuations = list(itertools.product(range(len(ALLOWED)), repeat=NUM_TOKENS))
    tokens = [PROMPT + [ALLOWED[index] for index in own] for own in continuations]
    with torch.inference_mode():
        logits = model(torch.tensor(tokens)).logits[:, len(PROMPT) - 1 : -1, list(ALLOWED)]
    steps = (logits / TEMPERATURE).log_softmax(-1)
    index = torch.tensor(continuations)
    return steps.gather(2, index.unsqueeze(-1)).sum((1, 2)).exp()


def speculative(kind: str, target: Path, make_model: Callable[..., Path], folder: Path) -> SpeculativeConfig:
    given: dict[str, Any] = {"method": kind, "num_speculative_tokens": 2}
    if kind == "draft_model":
        given["model"] = str(make_model("llama", seed=5, num_hidden_layers=1))
    elif kind == "eagle3":
        vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
        given["model"] = str(write_eagle3(folder / "head", vocab_size, num_layers=3))
    options = EngineOptions(
        str(target), speculative_config=json.dumps(given), dtype="float32", max_model_len=64
    )
    config = resolve(options, Machine(1, 0)).speculative
    assert config is not None
    return config


@pytest.mark.parametrize("kind", slow_except(["ngram", "eagle3"], ["ngram", "draft_model", "eagle3", "mtp"]))
def test_sampled_tokens_have_the_distribution_of_the_model(
    kind: str,
    target: Path,
    expected: torch.Tensor,
    make_model: Callable[..., Path],
    make_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "mtp":
        target = add_mtp(target, tmp_path / "with-head", mimo=False)
    config = speculative(kind, target, make_model, tmp_path)
    for module in (draft_model, head_proposer):  # one native call would not see the restriction below
        monkeypatch.setattr(module, "plan_fused_chain", lambda *arguments, **named: None)
    engine = make_engine(target, 1, 1000, max_model_len=64, block_size=4, max_num_seqs=64, speculative=config)
    driver = RankedDriver(replace(engine.config.with_num_blocks(1000), speculative=config), engine.step)
    # Drafts see the same restriction, so that some are right.
    monkeypatch.setattr(
        engine.runners[0].memory.sampler, "sample_tokens", restricted(engine.runners[0].memory.sampler)
    )
    for handle in range(NUM_SEQUENCES):
        driver.add(
            handle,
            PROMPT,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            temperature=TEMPERATURE,
            seed=handle,
            allowed_token_ids=ALLOWED,
        )
    driver.run(2)
    counts = torch.zeros(len(ALLOWED) ** NUM_TOKENS, dtype=torch.float64)
    for output in driver.outputs.values():
        counts[
            sum(ALLOWED.index(token) * len(ALLOWED) ** (NUM_TOKENS - 1 - i) for i, token in enumerate(output))
        ] += 1
    stats = driver.scheduler.stats
    assert 0 < sum(stats.num_accepted) < stats.num_draft_tokens
    assert_chi_square(counts, expected * NUM_SEQUENCES)


def restricted(sampler: Any) -> Callable[..., torch.Tensor]:
    """Return `sample_tokens` for ALLOWED alone."""
    sample_tokens = sampler.sample_tokens

    def sample(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        mask = torch.full_like(logits, -torch.inf)
        mask[:, list(ALLOWED)] = 0.0
        return sample_tokens(logits + mask, *arguments)

    return sample
