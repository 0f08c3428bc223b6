"""Benchmarks without other tests run to their end and write their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Command |-> the number of figures that it writes, and one of them.
COMMANDS = {
    "families --quick --kinds gptj,gemma4_text,deepseek_v3": (24, "families.gptj.quire.decode_tokens_per_s"),
    "state_dtype --quick --kinds mamba": (3, "state_dtype.mamba.bfloat16.float32"),
    "families --quick --kinds lfm2,qwen3_5_text,recurrent_gemma": (
        24,
        "families.lfm2.quire.decode_tokens_per_s",
    ),
    "loading --model s --formats bfloat16,awq --repeats 1": (22, "loading.awq.quire.load_s_per_gb"),
    "paged_attention --requests 20": (27, "paged.8192.waste"),
    "simulated_figures --requests 20": (52, "chunk.8192.itl_ms.p99"),
    "large_fleet --replicas 4 --gateways 2 --seconds 1": (38, "large_fleet.loss.replaced_s"),
    "paged_engine --repeats 1": (30, "sharing.alpaca.beams.6.saved"),
    "memory --quick": (67, "memory.hit_rate.coding_multiturn"),
    "gateway --seconds 0.5 --streams 2 --gateways 1 2": (10, "gateway.grpc.2.two_gateways.added_ms_p99"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", COMMANDS)
def test_command_writes_its_figures(command: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    name, *options = command.split()
    program = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(path)]
    subprocess.run(program, cwd=ROOT, check=True, timeout=880, stdout=subprocess.DEVNULL)
    figures = json.loads(path.read_text())["figures"]
    count, key = COMMANDS[command]
    assert len(figures) == count
    assert figures[key]["value"] > 0
