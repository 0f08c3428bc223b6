"""Host memory: available_bytes, and allocations beyond it raise before they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.errors import ConfigError
from quire.worker.comm.communicator import SingleRank
from quire.worker.memory import allocation
from quire.worker.memory.cache_engine import bytes_per_block
from quire.worker.memory.host_memory import available_bytes
from quire.worker.rank.rank_memory import DTYPES
from quire.worker.rank.runner import ModelRunner

GIB = 1 << 30


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("limit", "left"), [("max", 8 * GIB), (str(5 * GIB), 3 * GIB), (str(64 * GIB), 8 * GIB), ("0", 0)]
)
def test_available_bytes_is_minimum_of_machine_and_container(tmp_path: Path, limit: str, left: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       99 kB\nMemAvailable:   {8 << 20} kB\nBuffers: 7 kB\n")
    stat = f"anon {2 * GIB}\ninactive_file {GIB}\nactive_file 5\n"
    cgroup = write(tmp_path, memory_max=f"{limit}\n", memory_current=f"{3 * GIB}\n", memory_stat=stat)
    assert available_bytes(meminfo, cgroup) == left


def test_available_bytes_is_none_without_system_files(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "meminfo", tmp_path) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no Linux")
def test_available_bytes_of_this_machine_is_plausible() -> None:
    left = available_bytes()
    assert left is not None
    assert 0 < left < 1 << 50


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_kv_blocks": 9}, "kv_cache_memory"),
        ({"num_kv_blocks": 2, "num_host_kv_blocks": 9}, "num_host_kv_blocks"),
    ],
)
def test_kv_memory_beyond_available_raises_config_error(
    options: dict[str, Any], named: str, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(EngineOptions(str(make_model("llama")), device="cpu", **options), Machine.this())
    assert config.cache.num_kv_blocks is not None
    runner = ModelRunner(config, SingleRank())
    per_block = bytes_per_block(config, DTYPES[config.model.dtype])
    monkeypatch.setattr(allocation, "available_bytes", lambda: 9 * per_block - 1)
    with pytest.raises(ConfigError, match=rf"rank 0 .* GiB of KV memory.*{named}"):
        runner.allocate_cache(config.cache.num_kv_blocks)
    monkeypatch.setattr(allocation, "available_bytes", lambda: 12 * per_block)
    runner.allocate_cache(config.cache.num_kv_blocks)
    runner.close()
