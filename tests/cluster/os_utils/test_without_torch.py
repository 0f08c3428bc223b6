"""A gateway describes models and loads tokenizers without torch, with the same outcome as with it."""

from __future__ import annotations

import subprocess
import sys

import torch

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.os_utils.without_torch import keep_torch_out
from quire.cluster.text.requests.tokenizer import Tokenizer

TEXT = "It was a dark evening"
DESCRIBE = f"""
import sys
from quire.cluster.os_utils.without_torch import keep_torch_out
keep_torch_out()
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.text.requests.tokenizer import Tokenizer
config = resolve(EngineOptions("demo", device="cpu"), Machine(2, 0))
tokenizer = Tokenizer(config.model.path)
print(config, tokenizer.encode({TEXT!r}))
assert sys.modules["torch"] is None
"""


def test_description_is_the_same_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    config = resolve(EngineOptions("demo", device="cpu"), Machine(2, 0))
    assert done.stdout == f"{config} {Tokenizer(config.model.path).encode(TEXT)}\n"


def test_imported_torch_stays() -> None:
    keep_torch_out()
    assert sys.modules["torch"] is torch
