"""A gateway describes models and loads tokenizers without torch, with the same outcome as with it."""

from __future__ import annotations

import subprocess
import sys

DESCRIBE = """
import sys
{first}
from quire.cluster.host.without_torch import keep_torch_out
keep_torch_out()
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.requests.tokenizer import Tokenizer
config = resolve(EngineOptions("demo", device="cpu"), Machine(2, 0))
tokenizer = Tokenizer(config.model.path)
print(config, tokenizer.encode("It was a dark evening"))
assert (sys.modules["torch"] is not None) == {has_torch}
"""


def describe(first: str, *, has_torch: bool) -> str:
    program = DESCRIBE.format(first=first, has_torch=has_torch)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_description_is_the_same_without_torch() -> None:
    assert describe("", has_torch=False) == describe("import torch", has_torch=True)
