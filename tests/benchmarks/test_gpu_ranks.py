"""Stage `ranks` of benchmarks.gpu on the stand-in GPU, which each of its processes has for itself."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton_device  # noqa: F401  (before Triton)
from kernel_references import find_reference
from stand_in_gpu import installed

from benchmarks.gpu import ranks
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import CPU
from quire.worker.rank import device

ROOT = Path(__file__).parents[2]
# Of a process that starts on a busy machine.
REPLY_S = 300.0
# Installs the device when a process starts, for as long as it runs.
SITE = """
from contextlib import ExitStack

import pytest
import triton_device
from kernel_references import find_reference
from stand_in_gpu import installed

from quire.worker.rank import device

device._has_cuda_driver = lambda: True
STACK = ExitStack()
STACK.enter_context(installed(pytest.MonkeyPatch(), stand_in=find_reference))
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_are_killed_and_replaced_on_the_stand_in_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the middle of its graphs, and one of two that meet over gloo; all give the tokens of one process."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    places = str(tmp_path), str(ROOT / "tests/support"), str(ROOT), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setattr(device, "_has_cuda_driver", lambda: True)
    monkeypatch.setattr(ranks, "REPLY_S", REPLY_S)
    # Steps of the default size take the reference ops of the warm-up a minute.
    monkeypatch.setattr(ranks, "OPTIONS", ranks.OPTIONS | {"max_num_batched_tokens": 64})
    record = Record(tmp_path, "ranks", time.monotonic() + 3600, "stand-in")
    with installed(monkeypatch, stand_in=find_reference) as gpu:
        ranks.run(record, tmp_path, tmp_path, replace(CPU, device="cuda"))
        assert gpu.num_replays > 0
    assert record.problems == []
    assert list(record.figures) == ["gpu.ranks.killed.freed_s", "gpu.ranks.two.recovered_s"]
