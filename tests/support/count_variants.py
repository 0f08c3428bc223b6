"""Counts the kernel variants that Triton would compile while requests run: ``count_variants.py MODEL [FEATURE]``.

The feature is ``lora``, ``draft_model`` (the model drafts for itself), ``eager`` (no graphs), or none.

The whole worker runs on a stand-in GPU. Each launch binds and specializes its arguments as on a GPU of compute
capability 9.0, and computes its result by the PyTorch twin; nothing is compiled. Prints the number of variants before
the first step, and then each variant that a random load needs in addition.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compile_kernels import StandInDriver
from kernel_twins import find_twin
from ranked_driver import RankedDriver
from stand_in_gpu import installed
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.cluster.config.model_config import describe_model
from quire.kernels import decode_splits, dispatch
from quire.proto.config import LoraConfig, SpeculativeConfig
from quire.proto.lora import NO_SLOT
from quire.proto.step import RowLogitsProcessors, RowSampling

CAPABILITY = 90
NUM_SEQUENCES = 60
MAX_LEN = 120
NUM_BLOCKS = 512


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
    """Return a function that binds the launches of a wrapper, and computes with its twin."""
    wrapper = getattr(importlib.import_module(f"quire.kernels.gpu.{module}"), name)
    twin = find_twin(module, name)

    def bind_and_compute(*args: Any, **kwargs: Any) -> Any:
        wrapper(*args, **kwargs)
        return twin(*args, **kwargs)

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


def settings_of(feature: str, folder: Path) -> dict[str, Any]:
    """Return the settings of the engine."""
    if feature == "lora":
        return {"lora": LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)}
    if feature == "draft_model":
        draft = replace(describe_model(folder, "draft"), dtype="float32", max_model_len=256)
        return {"speculative": SpeculativeConfig("draft_model", 3, draft=draft)}
    return {"cuda_graphs": feature != "eager"}


def run_random_load(engine: Any, make_sequence: Callable[..., Any], feature: str) -> None:
    """Run sequences of all kinds. With drafts, the scheduler plans their steps; otherwise Planner does."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1, 300) for _ in range(rng.choice([1, 2, 5, 17, 33, MAX_LEN]))]
        for _ in range(NUM_SEQUENCES)
    ]
    if feature == "draft_model":
        driver = RankedDriver(engine.config.with_num_blocks(NUM_BLOCKS), engine.step)
        for index, prompt in enumerate(prompts):
            sampling: dict[str, Any] = {
                "temperature": rng.choice([0.0, 0.9]),
                "top_p": rng.choice([1.0, 0.9]),
                "seed": index,
            }
            driver.add(index, prompt, max_tokens=rng.randrange(1, 20), ignore_eos=True, **sampling)
        driver.run()
        return
    slots = (NO_SLOT, 0, 1) if feature == "lora" else (NO_SLOT,)
    sequences = [
        make_sequence(
            prompt,
            rng.randrange(1, 20),
            random_sampling(rng),
            arrival=rng.randrange(40),
            lora_slot=rng.choice(slots),
        )
        for prompt in prompts
    ]
    engine.generate(sequences, chunk_len=16)


def main(folder: Path, feature: str) -> None:
    path = Path(__file__).parent.parent / "worker" / "conftest.py"
    spec = importlib.util.spec_from_file_location("worker_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    worker: Any = importlib.util.module_from_spec(spec)
    sys.modules["worker_conftest"] = worker
    spec.loader.exec_module(worker)
    os.environ.pop("TRITON_INTERPRET", None)  # which triton_device sets
    variants = Variants()
    variants.install()
    decode_splits.NUM_EXTRA_ITEMS = 4
    dispatch.has_kernels = lambda tensor: getattr(tensor, "device", None) == torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch, installed(patch, stand_in=stand_in):
        settings = {"block_size": 4, "max_num_seqs": 24, **settings_of(feature, folder)}
        engine = worker.Engine(folder, device="cuda", num_blocks=NUM_BLOCKS, **settings)
        print("ready", len(variants.new))
        variants.new.clear()
        run_random_load(engine, worker.Planned, feature)
        for variant in variants.new:
            print("new", variant)
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or [""])
