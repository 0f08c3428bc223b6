"""How fast prompts are answered offline: greedy, ends ignored, on five workloads of token ids.

    python -m benchmarks.offline --json benchmarks/results/offline.json
    python -m benchmarks.offline --peers DIR --tensor-parallel-size 2 --json FILE

- w1: 64 requests at once; lengths lognormal, prompts of 16 to 768 tokens (mean 160), answers of 8 to 384 (mean 100).
- w2: the same with 16 requests, for models that are slow.
- w3: one request, 128 tokens in and 128 out; the decode rate leaves the prefill out.
- w4: one prompt of 1,024 tokens, time to its first token.
- w5: 32 requests that share 512 tokens and have 32 of their own, 32 out.

Each repetition has new prompts, so that no cached prefix carries over. Without --model-dir a model of random weights
is made for the run: s, a Llama of 60 million, or m, in the shape of Qwen2.5-0.5B.

With --peers other engines are measured in the same run, from the environments that `benchmarks.peers.install` has
made in DIR. All engines load the same files, get the same prompts and take turns; who is not measured is stopped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import string
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figure, median, parser, report
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import MODULES, TENSOR_PARALLEL, Engine, EngineFailed, engines
from quire import LLM, SamplingParams

TOKENIZER_LEN = 32000
# Ids below the first are special or bytes in some tokenizers.
FIRST_TOKEN, LAST_TOKEN = 300, 30000

Clock = Callable[[Requests], float]  # the seconds that answering takes

COMMON: dict[str, Any] = {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "s": (
        "Llama",
        {
            "vocab_size": TOKENIZER_LEN, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "m": (
        "Qwen2",
        {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def make_model(folder: Path, kind: str) -> None:
    """Writes one of MODELS in float32 with a tokenizer.

    Projections keep the variance of their inputs, and queries and keys are twice as large: with the usual small
    weights a random model repeats one token.
    """
    import torch
    import transformers

    family, sizes = MODELS[kind]
    config = getattr(transformers, f"{family}Config")(**sizes, **COMMON)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32)
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


def mixed(count: int, repetition: int) -> Requests:
    rng = np.random.default_rng(0)
    prompt_lens = lognormal_lens(rng, count, 160, 16, 768)
    answer_lens = lognormal_lens(rng, count, 100, 8, 384)
    return [
        (token_ids(prompt_len, repetition, place), answer_len)
        for place, (prompt_len, answer_len) in enumerate(zip(prompt_lens, answer_lens, strict=True))
    ]


def shared_prefix(count: int, repetition: int) -> Requests:
    prefix = token_ids(512, repetition, 10_000)
    return [(prefix + token_ids(32, repetition, 20_000 + place), 32) for place in range(count)]


def single(prompt_len: int, answer_len: int, repetition: int) -> Requests:
    return [(token_ids(prompt_len, repetition, 30_000 + prompt_len + answer_len), answer_len)]


def warm_up() -> Requests:
    """For what first calls build, touch and allocate."""
    return [(prompt[:64], 8) for prompt, _ in mixed(8, 900)]


def time_all(
    clocks: Mapping[str, Clock], make: Callable[[int], Requests], repetitions: int
) -> dict[str, list[float]]:
    """Engine |-> seconds of each repetition. Engines take turns: what disturbs the machine disturbs all of them."""
    walls: dict[str, list[float]] = {name: [] for name in clocks}
    for repetition in range(repetitions):
        for name, clock in clocks.items():
            walls[name].append(clock(make(repetition)))
    return walls


def throughput(clocks: Mapping[str, Clock], name: str, repetitions: int) -> dict[str, dict[str, Figure]]:
    """Output tokens a second, over the workload's whole time."""
    make = {"w1": partial(mixed, 64), "w2": partial(mixed, 16), "w5": partial(shared_prefix, 32)}[name]
    num_tokens = sum(length for _, length in make(0))
    return {
        engine: {
            f"{name}.output_tokens_per_s": Figure(num_tokens / median(walls), "tokens/s"),
            f"{name}.output_tokens_per_s_best": Figure(num_tokens / min(walls), "tokens/s"),
        }
        for engine, walls in time_all(clocks, make, repetitions).items()
    }


def single_stream(clocks: Mapping[str, Clock], repetitions: int) -> dict[str, dict[str, Figure]]:
    firsts = time_all(clocks, partial(single, 128, 1), repetitions)
    return {
        engine: {
            "w3.decode_tokens_per_s": Figure(127 / (median(walls) - median(firsts[engine])), "tokens/s"),
            "w3.decode_tokens_per_s_best": Figure(127 / (min(walls) - min(firsts[engine])), "tokens/s"),
            "w3.first_token_ms": Figure(1e3 * median(firsts[engine]), "ms"),
        }
        for engine, walls in time_all(clocks, partial(single, 128, 128), repetitions).items()
    }


def long_prompt(clocks: Mapping[str, Clock], repetitions: int) -> dict[str, dict[str, Figure]]:
    return {
        engine: {
            "w4.first_token_ms": Figure(1e3 * median(walls), "ms"),
            "w4.first_token_ms_best": Figure(1e3 * min(walls), "ms"),
        }
        for engine, walls in time_all(clocks, partial(single, 1024, 1), max(5, repetitions)).items()
    }


def measure(clocks: Mapping[str, Clock], workload: str, repetitions: int) -> dict[str, dict[str, Figure]]:
    """Engine |-> its figures."""
    if workload == "w3":
        return single_stream(clocks, repetitions)
    if workload == "w4":
        return long_prompt(clocks, repetitions)
    return throughput(clocks, workload, repetitions)


def measure_llm(arguments: argparse.Namespace, folder: Path) -> dict[str, Figure]:
    """quire alone, in this process."""
    started = time.perf_counter()
    llm = LLM(
        str(folder),
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
        max_model_len=2048,
    )

    def clock(requests: Requests) -> float:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
        started = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in requests], params)
        elapsed = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in requests]
        return elapsed

    with llm:
        figures = {"offline.load_s": Figure(time.perf_counter() - started, "s")}
        clock(warm_up())
        for workload in arguments.workloads.split(","):
            found = measure({"quire": clock}, workload, arguments.repetitions)["quire"]
            figures |= {f"offline.{name}": figure for name, figure in found.items()}
    return figures


def measure_peers(arguments: argparse.Namespace, folder: Path) -> dict[str, Figure]:
    """quire and the peers in processes of their own, in turns. An engine that fails is left out from there on."""
    names = arguments.engines.split(",")
    if arguments.tensor_parallel_size > 1:
        names = [name for name in names if name in TENSOR_PARALLEL]
    options = ["--model-dir", str(folder), "--dtype", arguments.dtype, "--threads", str(os.cpu_count())]
    options += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    figures: dict[str, Figure] = {}
    with engines(names, arguments.peers, options, arguments.peers / "logs") as (started, failures):
        running = {engine.name: engine for engine in started}

        def clock(engine: Engine, requests: Requests) -> float:
            engine.resume()
            try:
                return engine.seconds(requests)
            except EngineFailed as error:
                failures[engine.name] = str(error)
                raise
            finally:
                engine.pause()

        for engine in started:
            figures[f"peers.{engine.name}.load_s"] = Figure(engine.load_s, "s")
        tasks: list[Callable[[Mapping[str, Clock]], dict[str, dict[str, Figure]]]] = [
            lambda clocks: {name: {} for name in time_all(clocks, lambda _: warm_up(), 1)}
        ]
        tasks += [
            partial(measure, workload=workload, repetitions=arguments.repetitions)
            for workload in arguments.workloads.split(",")
        ]
        for task in tasks:
            for name, found in _run_task(task, running, clock, failures).items():
                figures |= {f"peers.{name}.{figure_name}": figure for figure_name, figure in found.items()}
    for name, reason in failures.items():
        print(f"{name}: {reason}")
    return figures


def _run_task(
    task: Callable[[Mapping[str, Clock]], dict[str, dict[str, Figure]]],
    running: dict[str, Engine],
    clock: Callable[[Engine, Requests], float],
    failures: Mapping[str, str],
) -> dict[str, dict[str, Figure]]:
    """A task of all that run; begun anew without an engine that failed in it."""
    while running:
        try:
            return task({name: partial(clock, engine) for name, engine in running.items()})
        except EngineFailed:
            for name in running.keys() & failures.keys():
                del running[name]
    return {}


def run(arguments: argparse.Namespace, folder: Path) -> None:
    if not (folder / "config.json").exists():
        make_model(folder, arguments.model)
    figures = measure_llm(arguments, folder) if arguments.peers is None else measure_peers(arguments, folder)
    note = f"model {arguments.model if arguments.model_dir is None else folder.name}, {arguments.dtype}, "
    note += f"{os.cpu_count()} cores, tensor_parallel_size {arguments.tensor_parallel_size}"
    report({name: Figure(f.value, f.unit, note) for name, f in figures.items()}, arguments.json)


def _make_tokenizer() -> Any:
    """Byte-level BPE whose tokens beyond the bytes are made-up words of two to four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    pairs = list(itertools.product(letters, letters))
    words = pairs + [("".join(pair), letter) for pair in pairs for letter in letters]
    words += [("".join(left), "".join(right)) for left in pairs for right in pairs]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = words[: TOKENIZER_LEN - len(alphabet)]
    vocab = {token: index for index, token in enumerate([*alphabet, *map("".join, words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=words))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The last words, which no prompt has.
    special = dict(zip(("bos_token", "eos_token", "pad_token"), map("".join, words[-3:]), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def main() -> None:
    line = parser(__doc__)
    line.add_argument("--model", choices=MODELS, default="s", help="which to make (default: %(default)s)")
    line.add_argument(
        "--model-dir", type=Path, help="a model directory; made there if it is empty or missing"
    )
    line.add_argument(
        "--workloads", default="w1,w3,w4,w5", help="of w1, w2, w3, w4, w5 (default: %(default)s)"
    )
    line.add_argument("--repetitions", type=int, default=3)
    line.add_argument("--dtype", default="float32")
    line.add_argument("--tensor-parallel-size", type=int, default=1)
    line.add_argument("--peers", type=Path, metavar="DIR", help="measure other engines, too; where they are")
    line.add_argument("--engines", default=",".join(MODULES), help="with --peers (default: %(default)s)")
    arguments = line.parse_args()
    unknown = set(arguments.engines.split(",")) - MODULES.keys()
    if unknown:
        line.error(f"no such engine: {', '.join(sorted(unknown))}")
    if arguments.model_dir is not None:
        run(arguments, arguments.model_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(arguments, Path(folder) / f"model-{arguments.model}")


if __name__ == "__main__":
    main()
