"""LLM.close frees what the model took, though the variable lives on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels import workspace
from quire.worker.graphs import Recording
from quire.worker.memory.allocation import free_unused_memory

# Prints the bytes of all live tensors before the model, with it, and after it was closed.
_LIVE = """
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

LLM(sys.argv[1], device="cpu", num_kv_blocks=8).close()  # what stays for the next model of the process
before = live_bytes()
llm = LLM(sys.argv[1], device="cpu", num_kv_blocks=64)
llm.generate("The quick brown fox", SamplingParams(temperature=0.0, max_tokens=4))
held = live_bytes()
llm.close()
after = live_bytes()
llm.close()
print(before, held, after)
"""

# Prints the resident bytes before the model, with it, and after it was closed.
_RESIDENT = """
import sys
from quire import LLM

def resident():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))

LLM(sys.argv[1], device="cpu", num_kv_blocks=8).close()
before = resident()
llm = LLM(sys.argv[1], device="cpu", kv_cache_memory=300_000_000)
llm.generate("The quick brown fox")
held = resident()
llm.close()
print(before, held, resident())
"""


def run_program(program: str, model: Path) -> list[int]:
    """Run a program in a process of its own, whose memory no other test has used; return the numbers it prints."""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return [int(number) for number in ran.stdout.split()]


# llama is quire's own model, gpt_neox is served through transformers.
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_closed_llm_holds_no_tensors(make_model: Any, kind: str) -> None:
    before, held, after = run_program(_LIVE, make_model(kind))
    assert held - before > 1_000_000
    assert after - before < 10_000


def test_closed_llm_returns_memory_to_the_system(make_model: Any) -> None:
    before, held, after = run_program(_RESIDENT, make_model("llama"))
    assert held - before > 250_000_000
    assert after - before < 50_000_000


def test_workspace_is_freed_except_for_recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the process may replay graphs that use its address."""
    monkeypatch.setattr(workspace, "_workspaces", {})
    device = torch.device("cpu")
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
