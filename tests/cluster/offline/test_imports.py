"""LLM on one rank needs neither Ray, nor ZeroMQ, nor gRPC."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

# Imports of these fail as if they were not installed.
_PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("ray", "zmq", "grpc")))
from quire import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", num_kv_blocks=16) as llm:
    (output,) = llm.generate("The quick brown fox", SamplingParams(temperature=0.0, max_tokens=3))
print(len(output.outputs[0].token_ids))
"""


def test_llm_on_one_rank_runs_without_ray_zmq_and_grpc(make_model: Any) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(make_model("llama"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["3"]
