"""LLM on one rank needs neither Ray, nor ZeroMQ, nor gRPC; clients, gateways and controllers need no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from deadlines import PROGRAM_TIMEOUT_S

# Reports each attempt to import these, and lets it fail as if they were not installed.
_PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "zmq", "grpc"):
            print("imports", name)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from quire import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", num_kv_blocks=16) as llm:
    (output,) = llm.generate("The quick brown fox", SamplingParams(temperature=0.0, max_tokens=3))
print(len(output.outputs[0].token_ids))
"""
_CLIENT = """
import sys
from quire import AsyncClient, Client, SamplingParams, errors
import quire.cluster.cli
print(sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""
# Neither has a model. Torch is 300 MB of memory and seconds of a start.
_SERVICES = """
import sys
import quire.cluster.cli.serve.single_host
import quire.cluster.fleet.controller.controller
import quire.cluster.gateway.grpc.inference
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


def printed_by(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_llm_on_one_rank_runs_without_ray_zmq_and_grpc(make_model: Any) -> None:
    assert printed_by(_PROGRAM, str(make_model("llama"))) == "3\n"


def test_client_and_command_import_no_torch_ray_or_transformers() -> None:
    assert printed_by(_CLIENT) == "[]\n"


def test_gateways_and_controllers_import_no_torch_or_transformers() -> None:
    assert printed_by(_SERVICES) == "[]\n"
