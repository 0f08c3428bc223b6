"""Counts the kernel variants that Triton would compile while requests run.

Usage: ``count_variants.py MODEL [FEATURE [ready]]``.

The feature is one of FEATURES, or none. With ``ready`` no requests run.

The whole worker runs on a stand-in GPU. Each launch binds and specializes its arguments as on a GPU of compute
capability 9.0, and computes its result by the PyTorch reference; nothing is compiled. Prints the variants before the
first step and their number, and then each variant that a random load needs in addition.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from compile_kernels import StandInDriver
from draft_heads import write_eagle3
from kernel_references import find_reference
from ranked_driver import RankedDriver
from stand_in_gpu import installed
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.kernels import decode_splits, dispatch
from quire.proto.config import LoraConfig, ModelConfig
from quire.proto.lora import NO_SLOT
from quire.proto.step import RowLogitsProcessors, RowSampling
from quire.proto.structured_outputs import OutputConstraint
from quire.scheduler.speculation.draft_switch import DraftSwitch
from quire.worker.structured.compilation import GrammarLibrary
from quire.worker.structured.grammar import GrammarSpec

CAPABILITY = 90
NUM_SEQUENCES = 60
MAX_LEN = 120
NUM_BLOCKS = 512
SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_seqs": 24}


class Variants:
    """The variants that launches needed so far; `new` are those since the last `clear`."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self.new: list[str] = []

    def install(self) -> None:
        driver.set_active(StandInDriver(CAPABILITY))
        triton.knobs.runtime.jit_cache_hook = self._note
        launch = JITFunction.run

        def bind_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return launch(kernel, *args, grid=grid, warmup=True, **kwargs)

        JITFunction.run = bind_only

    def _note(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Note a variant that is to be compiled; return True, so that it is not."""
        if (fn.name, key) not in self._known:
            self._known.add((fn.name, key))
            self.new.append(f"{fn.name} {key}")
        return True


def stand_in(module: str, name: str) -> Callable[..., Any]:
    """Return a function that binds the launches of a wrapper, and computes with its reference."""
    wrapper = getattr(importlib.import_module(f"quire.kernels.gpu.{module}"), name)
    reference = find_reference(module, name)

    def bind_and_compute(*args: Any, **kwargs: Any) -> Any:
        wrapper(*args, **kwargs)
        return reference(*args, **kwargs)

    return bind_and_compute


def random_sampling(rng: random.Random) -> RowSampling:
    processors = RowLogitsProcessors(2, 1.5, 0.5, 0.25, ((7, 2.0),), ((9,), (8, 9, 10)), stop_token_ids=(7,))
    kinds = [
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.8, seed=1),
        RowSampling(temperature=1.1, seed=2, top_k=20, top_p=0.9),
        RowSampling(temperature=0.7, seed=3, logits_processors=processors),
        RowSampling(temperature=0.7, seed=3, top_p=0.5, logits_processors=processors),
        RowSampling(temperature=0.0, logprobs=rng.randrange(6)),
    ]
    return rng.choice(kinds)


def drafts(method: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings of an engine that drafts by a method, three tokens per step."""
    text = json.dumps({"method": method, "num_speculative_tokens": 3, **settings})
    options = EngineOptions(
        str(folder), device="cpu", dtype="float32", max_model_len=256, speculative_config=text
    )
    return {"speculative": resolve(options, Machine(1, 0)).speculative}


def drafts_by_eagle3(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    sizes = {"num_layers": config["num_hidden_layers"], "draft_vocab_size": 90}
    head = write_eagle3(folder.with_name(f"{folder.name}-eagle3"), config["vocab_size"], **sizes)
    return drafts("eagle3", folder, model=str(head))


# feature |-> model directory |-> settings of the engine
FEATURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "": lambda folder: {},
    "eager": lambda folder: {"cuda_graphs": False},
    "lora": lambda folder: {"lora": LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)},
    "structured": lambda folder: {},
    "int8_kv": lambda folder: {"kv_dtype": "int8"},
    "ngram": lambda folder: drafts("ngram", folder),
    "draft_model": lambda folder: drafts("draft_model", folder, model=str(folder)),
    "eagle3": drafts_by_eagle3,
    "mtp": lambda folder: drafts("mtp", folder),
}


def run_random_load(engine: Any, make_sequence: Callable[..., Any], feature: str) -> None:
    """Run sequences of all kinds. With drafts, the scheduler plans their steps; otherwise Planner does."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1, 300) for _ in range(rng.choice([1, 2, 5, 17, 33, MAX_LEN]))]
        for _ in range(NUM_SEQUENCES)
    ]
    if engine.config.speculative is not None:
        run_scheduled(engine, prompts, rng)
        return
    slots = (NO_SLOT, 0, 1) if feature == "lora" else (NO_SLOT,)
    grammar = compile_grammar(engine.config.model) if feature == "structured" else None
    sequences = []
    for prompt in prompts:
        sampling = random_sampling(rng)
        if grammar is not None and rng.random() < 0.5:
            sampling = replace(sampling, constraint=OutputConstraint(len(prompt), grammar))
        lens = {"max_tokens": rng.randrange(1, 20), "arrival": rng.randrange(40)}
        sequences.append(make_sequence(prompt=prompt, sampling=sampling, lora_slot=rng.choice(slots), **lens))
    engine.generate(sequences, chunk_len=16)


def run_scheduled(engine: Any, prompts: list[list[int]], rng: random.Random) -> None:
    """Run sequences whose steps the scheduler plans, with as many drafts as it may plan, whatever they cost."""
    drafter = RankedDriver(engine.config.with_num_blocks(NUM_BLOCKS), engine.step)
    for index, prompt in enumerate(prompts):
        sampling: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.9]),
            "top_p": rng.choice([1.0, 0.9]),
            "seed": index,
            "logprobs": rng.choice([None, 2]),
        }
        drafter.add(index, prompt, max_tokens=rng.randrange(1, 20), ignore_eos=True, **sampling)
    with patch.object(DraftSwitch, "is_on", lambda *_: True):
        drafter.run()
    assert any(plan.draft_rows.size for plan in drafter.plans), "the scheduler planned no drafts"


def compile_grammar(model: ModelConfig) -> bytes:
    library = GrammarLibrary(model.path, model.vocab_size, model.eos_token_ids)
    return library.compile(GrammarSpec("regex", "([a-z]{2}[0-9]){40,}"))


def load_worker_conftest() -> Any:
    """Return tests/worker/conftest.py, with Triton's interpreter off."""
    path = Path(__file__).parent.parent / "worker" / "conftest.py"
    spec = importlib.util.spec_from_file_location("worker_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    worker: Any = importlib.util.module_from_spec(spec)
    sys.modules["worker_conftest"] = worker
    spec.loader.exec_module(worker)
    os.environ.pop("TRITON_INTERPRET", None)  # which triton_device sets
    return worker


def main(folder: Path, feature: str, until: str = "") -> None:
    worker = load_worker_conftest()
    variants = Variants()
    variants.install()
    decode_splits.NUM_EXTRA_ITEMS = 4
    dispatch.has_kernels = lambda tensor: getattr(tensor, "device", None) == torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch, installed(patch, stand_in=stand_in):
        settings = {**SETTINGS, **FEATURES[feature](folder)}
        engine = worker.Engine(folder, device="cuda", num_blocks=NUM_BLOCKS, **settings)
        for variant in variants.new:
            print("variant", variant)
        print("ready", len(variants.new))
        if until == "ready":
            return
        variants.new.clear()
        run_random_load(engine, worker.Planned, feature)
        for variant in variants.new:
            print("new", variant)
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or [""])
