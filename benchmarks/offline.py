"""How fast one process answers prompts: `LLM.generate` on four workloads of token ids, greedy, ends ignored.

    python -m benchmarks.offline --json benchmarks/results/offline.json

- w1: 64 requests at once; lengths lognormal, prompts of 16 to 768 tokens (mean 160), answers of 8 to 384 (mean 100).
- w2: the same with 16 requests, for models that are slow.
- w3: one request, 128 tokens in and 128 out; the decode rate leaves the prefill out.
- w4: one prompt of 1,024 tokens, time to its first token.
- w5: 32 requests that share 512 tokens and have 32 of their own, 32 out.

Each repetition has new prompts, so that no cached prefix carries over. Without --model-dir a Llama of 60 million
random weights is made for the run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import string
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.common import Figure, median, parser, report
from quire import LLM, SamplingParams

VOCAB_SIZE = 32000
# Ids below the first are special or bytes in some tokenizers.
FIRST_TOKEN, LAST_TOKEN = 300, 30000

Workload = list[tuple[list[int], int]]  # prompt ids and the length of the answer


def make_model(folder: Path) -> None:
    """Writes a Llama of 60 million weights with a tokenizer.

    Projections keep the variance of their inputs, and queries and keys are twice as large: with the usual small
    weights a random model repeats one token.
    """
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-5,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    gains = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 2.0}
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            layer = name.split(".")[-2]
            if weight.ndim == 2:
                std = 0.05 if layer == "embed_tokens" else gains.get(layer, 1.0) * weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.save_pretrained(folder)
    _make_tokenizer().save_pretrained(folder)


def lognormal_lens(rng: np.random.Generator, count: int, mean: float, low: int, high: int) -> list[int]:
    sigma = 0.8
    lens = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    rounded: list[int] = np.clip(np.rint(lens), low, high).astype(int).tolist()
    return rounded


def token_ids(count: int, *key: int) -> list[int]:
    ids: list[int] = np.random.default_rng([1234, *key]).integers(FIRST_TOKEN, LAST_TOKEN, count).tolist()
    return ids


def mixed(count: int, repetition: int) -> Workload:
    rng = np.random.default_rng(0)
    prompt_lens = lognormal_lens(rng, count, 160, 16, 768)
    answer_lens = lognormal_lens(rng, count, 100, 8, 384)
    return [
        (token_ids(prompt_len, repetition, place), answer_len)
        for place, (prompt_len, answer_len) in enumerate(zip(prompt_lens, answer_lens, strict=True))
    ]


def shared_prefix(count: int, repetition: int) -> Workload:
    prefix = token_ids(512, repetition, 10_000)
    return [(prefix + token_ids(32, repetition, 20_000 + place), 32) for place in range(count)]


def single(prompt_len: int, answer_len: int, repetition: int) -> Workload:
    return [(token_ids(prompt_len, repetition, 30_000 + prompt_len + answer_len), answer_len)]


def seconds(llm: LLM, workload: Workload) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for _, length in workload]
    started = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in workload], params)
    elapsed = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in workload]
    return elapsed


def throughput(llm: LLM, name: str, repetitions: int) -> dict[str, Figure]:
    """Output tokens a second, over the workload's whole time."""
    make = {
        "w1": lambda repetition: mixed(64, repetition),
        "w2": lambda repetition: mixed(16, repetition),
        "w5": lambda repetition: shared_prefix(32, repetition),
    }[name]
    num_tokens = sum(length for _, length in make(0))
    walls = [seconds(llm, make(repetition)) for repetition in range(repetitions)]
    return {
        f"offline.{name}.output_tokens_per_s": Figure(num_tokens / median(walls), "tokens/s"),
        f"offline.{name}.output_tokens_per_s_best": Figure(num_tokens / min(walls), "tokens/s"),
    }


def single_stream(llm: LLM, repetitions: int) -> dict[str, Figure]:
    first = [seconds(llm, single(128, 1, repetition)) for repetition in range(repetitions)]
    walls = [seconds(llm, single(128, 128, repetition)) for repetition in range(repetitions)]
    return {
        "offline.w3.decode_tokens_per_s": Figure(127 / (median(walls) - median(first)), "tokens/s"),
        "offline.w3.decode_tokens_per_s_best": Figure(127 / (min(walls) - min(first)), "tokens/s"),
        "offline.w3.first_token_ms": Figure(1e3 * median(first), "ms"),
    }


def long_prompt(llm: LLM, repetitions: int) -> dict[str, Figure]:
    walls = [seconds(llm, single(1024, 1, repetition)) for repetition in range(max(5, repetitions))]
    return {
        "offline.w4.first_token_ms": Figure(1e3 * median(walls), "ms"),
        "offline.w4.first_token_ms_best": Figure(1e3 * min(walls), "ms"),
    }


def measure(llm: LLM, workloads: list[str], repetitions: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    seconds(llm, [(prompt[:64], 8) for prompt, _ in mixed(8, 900)])  # first calls build, touch and allocate
    for name in workloads:
        if name == "w3":
            figures |= single_stream(llm, repetitions)
        elif name == "w4":
            figures |= long_prompt(llm, repetitions)
        else:
            figures |= throughput(llm, name, repetitions)
    return figures


def run(arguments: argparse.Namespace, folder: Path) -> None:
    if not (folder / "config.json").exists():
        make_model(folder)
    started = time.perf_counter()
    llm = LLM(
        str(folder),
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
        max_model_len=2048,
    )
    with llm:
        figures = {"offline.load_s": Figure(time.perf_counter() - started, "s")}
        figures |= measure(llm, arguments.workloads.split(","), arguments.repetitions)
    note = f"{arguments.dtype}, {os.cpu_count()} cores, tensor_parallel_size {arguments.tensor_parallel_size}"
    report({name: Figure(f.value, f.unit, note) for name, f in figures.items()}, arguments.json)


def _make_tokenizer() -> object:
    """Byte-level BPE whose tokens beyond the bytes are made-up words of two to four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    pairs = list(itertools.product(letters, letters))
    words = pairs + [("".join(pair), letter) for pair in pairs for letter in letters]
    words += [("".join(left), "".join(right)) for left in pairs for right in pairs]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = words[: VOCAB_SIZE - len(alphabet)]
    vocab = {token: index for index, token in enumerate([*alphabet, *map("".join, words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=words))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def main() -> None:
    line = parser(__doc__)
    line.add_argument(
        "--model-dir", type=Path, help="a model directory; made there if it is empty or missing"
    )
    line.add_argument(
        "--workloads", default="w1,w3,w4,w5", help="of w1, w2, w3, w4, w5 (default: %(default)s)"
    )
    line.add_argument("--repetitions", type=int, default=3)
    line.add_argument("--dtype", default="float32")
    line.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = line.parse_args()
    if arguments.model_dir is not None:
        run(arguments, arguments.model_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder) / "llama-60m")


if __name__ == "__main__":
    main()
