"""LLM.close frees what the model took, though the variable lives on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import PROGRAM_TIMEOUT_S

from quire.kernels import workspace
from quire.worker.graphs.graphs import Recording
from quire.worker.memory.allocation import free_unused_memory

# Prints the bytes of live tensors and the resident bytes before each model, with it, and after it was closed.
_PROGRAM = """
import gc, sys, torch
from quire import LLM, SamplingParams

def live_bytes():
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if not isinstance(each, torch.Tensor) or each.device.type != "cpu":
            continue
        if each.is_mkldnn:  # weights packed by oneDNN have no storage
            storages[id(each)] = each.numel() * each.element_size()
        else:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())

def resident_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def measure():
    print(live_bytes(), resident_bytes())

for model in sys.argv[1:]:
    LLM(model, device="cpu", num_kv_blocks=8).close()  # what stays for the next model of the process
    measure()
    llm = LLM(model, device="cpu", kv_cache_memory=300_000_000)
    llm.generate("The quick brown fox", SamplingParams(temperature=0.0, max_tokens=4))
    measure()
    llm.close()
    measure()
    llm.close()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_closed_llm_returns_its_memory(make_model: Any) -> None:
    """In a process of its own, whose memory no other test has used."""
    models = make_model("llama"), make_model("gpt_neox")  # quire's own, and one served through transformers
    command = [sys.executable, "-c", _PROGRAM, *map(str, models)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    numbers = [[int(number) for number in line.split()] for line in ran.stdout.splitlines()]
    assert len(numbers) == 3 * len(models)
    for start in range(0, len(numbers), 3):
        (live, resident), (held_live, held_resident), (after_live, after_resident) = numbers[
            start : start + 3
        ]
        assert held_live - live > 250_000_000
        assert after_live - live < 10_000
        assert held_resident - resident > 250_000_000
        assert after_resident - resident < 50_000_000


def test_workspace_is_freed_except_for_recorded_graphs() -> None:
    """Another engine of the process may replay graphs that use its address."""
    device = torch.device("cpu")
    workspace.free_workspaces(device)  # of tests before
    used = workspace.float_workspace(100, device)
    recording = Recording(lambda: None, used, workspace.workspaces(device))
    assert workspace.float_workspace(50, device) is used
    free_unused_memory(device)
    assert workspace.workspaces(device) == ()
    assert recording.workspaces[0] is used
    assert workspace.float_workspace(50, device) is not used


def test_unused_memory_of_a_gpu_leaves_the_allocators_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty_cache"))
    free_unused_memory(torch.device("cuda", 0))
    assert calls == ["empty_cache"]
