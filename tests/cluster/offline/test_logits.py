"""Log-probabilities of models that scale or bound their logits equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import Reference, prompts_of

from quire import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0, "vocab_size": 387}),
        ("granite", {}),
        ("cohere2", {"logit_scale": 0.4}),
    ],
)
def test_scaled_and_bounded_logits_equal_transformers(
    make_model: Any, kind: str, settings: dict[str, Any]
) -> None:
    """Scaling does not change greedy tokens, but their probabilities."""
    folder = make_model(kind, seed=7, **settings)
    (prompt,) = prompts_of([12], seed=1)
    with LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=16) as llm:
        ((output,),) = (result.outputs for result in llm.generate([prompt], PARAMS))
    with torch.inference_mode():
        logits = (
            Reference(folder).model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        )
    expected = logits.log_softmax(dim=-1)[range(len(output.token_ids)), output.token_ids]
    assert output.logprobs is not None
    chosen = [entry[own].logprob for entry, own in zip(output.logprobs, output.token_ids, strict=True)]
    torch.testing.assert_close(torch.tensor(chosen), expected, atol=1e-4, rtol=0)
