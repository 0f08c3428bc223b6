"""Perplexity of the bundled model on held-out text, for each kind of quantization.

    python -m benchmarks.perplexity --json benchmarks/results/perplexity.json [--text DIR]

Every figure is computed by the serving engine from prompt log-probabilities. Without --text the text is
benchmarks/held_out, 50 kB. DIR is a folder with the works that the model was trained on (see benchmarks.demo_model);
their whole held-out part is used then. The run creates the 4-bit checkpoints itself, rounding to nearest.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import Figure, make_parser, names_from, report
from benchmarks.demo_model.works import read_works, split_held_out
from benchmarks.quantized_checkpoints import Scheme, write_checkpoint
from quire import LLM, SamplingParams
from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.worker.weights import linear_weight

BUNDLED = Path(__file__).parent / "held_out"
# Scored tokens per window; a token's context starts at its window.
WINDOW_LEN = 1000


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve the model.

    Attributes:
        options: of LLM; the defaults are float32 and full precision.
        scheme: quantization of the checkpoint; None for the original checkpoint.
        multiplies_float8: activations are rounded to float8 too, as on GPUs whose tensor cores multiply float8.
    """

    note: str
    options: dict[str, Any] = field(default_factory=dict)
    scheme: Scheme | None = None
    multiplies_float8: bool = False


VARIANTS = {
    "float32": Variant("computed in float32 from the stored bfloat16 weights"),
    "bfloat16": Variant("computed in bfloat16", {"dtype": "bfloat16"}),
    "int8": Variant("--quantization int8, one scale per output", {"quantization": "int8"}),
    "fp8": Variant("--quantization fp8, one scale per output; weights only", {"quantization": "fp8"}),
    "fp8_w8a8": Variant(
        "--quantization fp8 as on a GPU that multiplies float8: activations rounded too",
        {"quantization": "fp8"},
        multiplies_float8=True,
    ),
    "int8_checkpoint": Variant(
        "compressed-tensors, groups of 64", scheme=Scheme("codes", bits=8, group_len=64, symmetric=True)
    ),
    "gptq_int4_g32": Variant("GPTQ layout, groups of 32, rounded", scheme=Scheme("gptq", group_len=32)),
    "gptq_int4_g64": Variant("GPTQ layout, groups of 64, rounded", scheme=Scheme("gptq", group_len=64)),
    "gptq_int4_act_order": Variant(
        "GPTQ layout, groups of 64 inputs of similar weight, rounded",
        scheme=Scheme("gptq", group_len=64, act_order=True),
    ),
    "awq_int4_g64": Variant("AWQ layout, groups of 64, rounded", scheme=Scheme("awq", group_len=64)),
    "kv_int8": Variant("--kv-cache-dtype int8", {"kv_cache_dtype": "int8"}),
    "kv_fp8": Variant("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
    "int8_kv_int8": Variant(
        "--quantization int8 --kv-cache-dtype int8", {"quantization": "int8", "kv_cache_dtype": "int8"}
    ),
}


def read_texts(folder: Path | None) -> list[str]:
    if folder is None:
        return [file.read_text() for file in sorted(BUNDLED.glob("*.txt"))]
    return [split_held_out(text)[1] for text in read_works(folder)]


def windows(texts: list[str], folder: Path) -> list[list[int]]:
    """Return the token ids of the texts in windows of WINDOW_LEN + 1; a window's first token is not scored."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: list[list[int]] = []
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        found += [ids[start : start + WINDOW_LEN + 1] for start in range(0, len(ids) - 1, WINDOW_LEN)]
    return found


def mean_nats(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the mean negative log-probability per token, given the tokens before it in its window."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    logprobs: list[float] = []
    for output in llm.generate(prompts, params):
        assert output.prompt_token_ids is not None
        assert output.prompt_logprobs is not None
        for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
            if entry is not None:
                logprobs.append(entry[token_id].logprob)
    assert len(logprobs) == sum(len(prompt) - 1 for prompt in prompts)
    return -math.fsum(logprobs) / len(logprobs)


def measure(variant: Variant, prompts: list[list[int]], workspace: Path) -> float:
    """Return the perplexity of one variant."""
    folder = DEMO_MODEL_PATH
    if variant.scheme is not None:
        folder = workspace / "model"
        write_checkpoint(DEMO_MODEL_PATH, folder, variant.scheme)
    options: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 1024} | variant.options
    with ExitStack() as stack:
        if variant.multiplies_float8:
            stack.enter_context(mock.patch.object(linear_weight, "supports_float8_linear", return_value=True))
        return math.exp(mean_nats(stack.enter_context(LLM(str(folder), **options)), prompts))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--text", type=Path, metavar="DIR", help="folder with the works that the model was trained on"
    )
    parser.add_argument("--variants", type=names_from(VARIANTS), default=",".join(VARIANTS), metavar="NAME,...",
                      help="of %(default)s")  # fmt: skip
    arguments = parser.parse_args()
    prompts = windows(read_texts(arguments.text), DEMO_MODEL_PATH)
    num_tokens = sum(len(prompt) - 1 for prompt in prompts)
    figures: dict[str, Figure] = {}
    exact: float | None = None
    for name in arguments.variants:
        with tempfile.TemporaryDirectory() as workspace:
            perplexity = measure(VARIANTS[name], prompts, Path(workspace))
        exact = perplexity if name == "float32" else exact
        against = f"; {perplexity / exact - 1:+.2%}" if exact is not None and name != "float32" else ""
        note = f"{VARIANTS[name].note}{against}; {num_tokens} tokens"
        figures[f"perplexity.{name}"] = Figure(perplexity, "perplexity per token", note)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
