"""Error of recurrent states in bfloat16, beside that of the whole model in bfloat16.

    python -m benchmarks.state_dtype --json benchmarks/results/state_dtype.json

A random model of each kind scores a random text of NUM_TOKENS tokens, one token per step as in decode steps, so that
each token rounds the states. The weights are larger than those of a new model: the probability of a token depends on
its state.

- state_dtype.<kind>.<model>.<states>: mean difference of a token's log-probability from that of the model and the
  states in float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import Figure, make_parser, names_from, report
from benchmarks.families import make_model

NUM_TOKENS, NUM_QUICK = 512, 16
KINDS = ("qwen3_5_text", "kimi_linear", "bamba", "mamba", "minimax", "recurrent_gemma")
# Types of the model and of its states.
CASES = (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


def score(folder: Path, text: list[int], dtype: str, state_dtype: str) -> list[float]:
    """Return the log-probability of each token of a text after the first one."""
    from quire import LLM, SamplingParams

    llm = LLM(
        str(folder), device="cpu", dtype=dtype, mamba_ssm_cache_dtype=state_dtype, num_kv_blocks=512,
        max_model_len=1024, max_num_batched_tokens=1, max_num_seqs=1, prefix_caching=False,
    )  # fmt: skip
    (result,) = llm.generate([text], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    assert result.prompt_logprobs is not None
    places = zip(text, result.prompt_logprobs, strict=True)
    return [found[token].logprob for token, found in places if found is not None]


def measure(kind: str, num_tokens: int) -> dict[str, Figure]:
    """Return the figures of a kind of model."""
    text = np.random.default_rng(0).integers(1, 30000, num_tokens).tolist()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), kind, is_quick=True, initializer_range=0.1)
        exact = np.array(score(Path(folder), text, "float32", "float32"))
        errors = {case: np.abs(np.array(score(Path(folder), text, *case)) - exact).mean() for case in CASES}
    note = f"{num_tokens} tokens, mean log-probability {exact.mean():.2f}"
    return {
        f"state_dtype.{kind}.{dtype}.{states}": Figure(float(error), "nats", note)
        for (dtype, states), error in errors.items()
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", type=names_from(KINDS), default=list(KINDS), metavar="A,B,...")
    parser.add_argument("--quick", action="store_true", help="score a few tokens, to see that it works")
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for kind in arguments.kinds:
        figures |= measure(kind, NUM_QUICK if arguments.quick else NUM_TOKENS)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
