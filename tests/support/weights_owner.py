"""A process that loads one rank's weights for a standby, reports them, and lives until it is killed.

The first line of its input is a pickled EngineConfig in base64; it prints one line of JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.proto.config import EngineConfig
from quire.worker.attention import AttentionInputs
from quire.worker.comm.communicator import SingleRank
from quire.worker.memory.shared_segment import SegmentAddress
from quire.worker.rank.runner import ModelRunner
from quire.worker.rank.weight_peers import WeightServer
from quire.worker.weights.safetensors_file import SafetensorsFile
from quire.worker.weights.weight_source import WeightSource

if TYPE_CHECKING:
    import pytest

_NUM_TOKENS = 11


@dataclass(frozen=True)
class Owner:
    """The process, its segments, the digest of its logits, and its connection for readers of other hosts."""

    process: subprocess.Popen[bytes]
    addresses: tuple[SegmentAddress, ...]
    digest: str
    source: WeightSource


@contextmanager
def weights_owner(config: EngineConfig) -> Iterator[Owner]:
    """Start the process and wait until it has loaded."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(base64.b64encode(pickle.dumps(config)) + b"\n")
            process.stdin.flush()
            report = json.loads(process.stdout.readline())
            addresses = tuple(SegmentAddress(**each) for each in report["addresses"])
            token, key = map(bytes.fromhex, report["secrets"])
            source = WeightSource("the owner", (), "127.0.0.1", report["port"], ((token, key),))
            yield Owner(process, addresses, report["digest"], source)
        finally:
            process.kill()


def load_runner(config: EngineConfig, inherited: Sequence[SegmentAddress | WeightSource] = ()) -> ModelRunner:
    """Return a runner of one rank with a cache; its weights outlive its process."""
    config = replace(config, parallel=replace(config.parallel, standby_weights=True))
    runner = ModelRunner(config, SingleRank(), inherited=inherited)
    runner.allocate_cache(8)
    return runner


@torch.inference_mode()
def logits_of(runner: ModelRunner) -> Tensor:
    """Return the logits of a short prompt and of the token after it."""
    model, cache = runner.memory.loaded.model, runner.memory.kv.cache
    block_size = cache.layers[0].blocks.shape[-2]
    positions = torch.arange(_NUM_TOKENS + 1)
    tables = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    slots = tables[0, positions // block_size].long() * block_size + positions % block_size
    token_ids = torch.arange(7, 8 + _NUM_TOKENS, dtype=torch.int32)
    ends = torch.tensor([0, _NUM_TOKENS], dtype=torch.int32)
    prompt = AttentionInputs(0, slots[:-1], tables, ends, ends[1:])
    decode = AttentionInputs(1, slots[-1:], tables, ends[:1], ends[1:] + 1)
    hidden = [
        model.forward(token_ids[:-1], positions[:-1], cache.layers, prompt),
        model.forward(token_ids[-1:], positions[-1:], cache.layers, decode),
    ]
    return model.logits(torch.cat(hidden))


def digest_of(logits: Tensor) -> str:
    """Return a digest of the bits."""
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    config = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))  # noqa: S301
    own = load_runner(config)
    addresses = [dataclasses.asdict(address) for address in own.weight_segments]
    source = WeightServer("the owner").source(own.weight_segments, "127.0.0.1")
    report = {
        "addresses": addresses,
        "digest": digest_of(logits_of(own)),
        "port": source.port,
        "secrets": [secret.hex() for secret in source.credentials[0]],
    }
    print(json.dumps(report), flush=True)
    threading.Event().wait()


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the tensors that are read from files from now on."""
    names: list[str] = []
    read = SafetensorsFile.read_into

    def record(self: SafetensorsFile, out: torch.Tensor, name: str, *arguments: Any) -> int:
        names.append(name)
        return read(self, out, name, *arguments)

    monkeypatch.setattr(SafetensorsFile, "read_into", record)
    return names
