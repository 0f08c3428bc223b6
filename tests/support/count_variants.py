"""Counts the kernel variants that Triton would compile while requests run: ``python count_variants.py MODEL``.

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
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compile_kernels import StandInDriver
from kernel_twins import find_twin
from stand_in_gpu import installed
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.kernels import decode_splits, dispatch
from quire.proto.step import RowLogitsProcessors, RowSampling

CAPABILITY = 90
NUM_SEQUENCES = 60
MAX_LEN = 120


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


def main(folder: Path) -> None:
    path = Path(__file__).parent.parent / "worker" / "conftest.py"
    spec = importlib.util.spec_from_file_location("worker_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    worker: Any = importlib.util.module_from_spec(spec)
    sys.modules["worker_conftest"] = worker
    spec.loader.exec_module(worker)
    os.environ.pop("TRITON_INTERPRET", None)  # which triton_device sets
    variants, rng = Variants(), random.Random(0)
    variants.install()
    decode_splits.NUM_EXTRA_ITEMS = 4
    dispatch.has_kernels = lambda tensor: getattr(tensor, "device", None) == torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch, installed(patch, stand_in=stand_in):
        engine = worker.Engine(folder, device="cuda", num_blocks=512, block_size=4, max_num_seqs=24)
        print("ready", len(variants.new))
        variants.new.clear()
        sequences = [
            worker.Planned(
                [rng.randrange(1, 300) for _ in range(rng.choice([1, 2, 5, 17, 33, MAX_LEN]))],
                rng.randrange(1, 20),
                random_sampling(rng),
                arrival=rng.randrange(40),
            )
            for _ in range(NUM_SEQUENCES)
        ]
        engine.generate(sequences, chunk_len=16)
        for variant in variants.new:
            print("new", variant)
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
