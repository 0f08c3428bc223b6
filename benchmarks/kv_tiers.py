"""Time to the first token of a prompt after a restart: computed, and read from the files of --kv-disk.

    python -m benchmarks.kv_tiers --json benchmarks/results/kv_tiers.json

The model is random, of 60 million parameters, on a CPU; each figure is of an engine of its own in this process. The
files are read once from the system's page cache and once after they were dropped from it, beside plain reads of them,
and once from a file system in memory, as a pool of host memory that outlives servers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from quire import LLM, SamplingParams
from quire.cluster.offline.in_process import InProcessEngine

from .common import Figure, make_parser, write_figures
from .random_models import make_model

NUM_TOKENS = 2000, 8000
MAX_LEN = 8192
_READ_BYTES = 4 << 20


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, place = Path(folder) / "model", Path(folder) / "kv"
        make_model(model, "s")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
        for num_tokens in NUM_TOKENS:
            figures |= measure(model, place / str(num_tokens), num_tokens)
    for name, figure in figures.items():
        print(f"{name:40} {figure.value:12,.3f} {figure.unit:8} {figure.note}")
    if arguments.json:
        write_figures(arguments.json, figures)


def measure(model: Path, place: Path, num_tokens: int) -> dict[str, Figure]:
    """Return the figures of a prompt's length."""
    name = f"kv_tiers.{num_tokens}"
    computed_s, _ = time_to_first_token(model, place, num_tokens)  # and stored when the engine closes
    files = sorted(place.glob("quire-kv/*/*.kv"))
    warm_plain = plain_rate(files)
    warm_s, warm_rate = time_to_first_token(model, place, num_tokens)
    drop_from_page_cache(files)
    cold_plain = plain_rate(files)
    drop_from_page_cache(files)
    cold_s, cold_rate = time_to_first_token(model, place, num_tokens)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        shutil.copytree(place, memory, dirs_exist_ok=True)
        shutil.copy(place.parent / "key", Path(memory) / "key")
        tmpfs_s, tmpfs_rate = time_to_first_token(model, Path(memory), num_tokens, Path(memory) / "key")
    size = sum(path.stat().st_size for path in files)
    return {
        f"{name}.computed": Figure(computed_s, "s"),
        f"{name}.read.page_cache": Figure(warm_s, "s", f"{size / 2**20:.0f} MiB of KV"),
        f"{name}.read.disk": Figure(cold_s, "s", "files dropped from the page cache"),
        f"{name}.read.tmpfs": Figure(tmpfs_s, "s", "files in /dev/shm"),
        f"{name}.rate.tmpfs": Figure(tmpfs_rate, "MB/s", "verified, into host blocks"),
        f"{name}.rate.page_cache": Figure(warm_rate, "MB/s", "verified, into host blocks"),
        f"{name}.rate.page_cache.plain": Figure(warm_plain, "MB/s", "plain reads"),
        f"{name}.rate.disk": Figure(cold_rate, "MB/s", "verified, into host blocks"),
        f"{name}.rate.disk.plain": Figure(cold_plain, "MB/s", "plain reads"),
    }


def time_to_first_token(
    model: Path, place: Path, num_tokens: int, key: Path | None = None
) -> tuple[float, float]:
    """Return the seconds until the first token in a new engine, and MB/s of its reads; 0 without any."""
    prompt = [5 + (31 * index) % 20_011 for index in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    llm = LLM(
        str(model), device="cpu", dtype="float32", max_model_len=MAX_LEN, kv_cache_memory=1 << 30, max_num_seqs=4,
        kv_disk=f"{place}:4GiB", kv_key=str(key or place.parent / "key"),
    )  # fmt: skip
    with llm:
        llm.generate([prompt[-40:]], params)  # warms what the first prompt of a process pays for
        began_at = time.perf_counter()
        llm.generate([prompt], params)
        seconds = time.perf_counter() - began_at
        engine = llm._engine
        assert isinstance(engine, InProcessEngine)
        stored = engine.scheduler.blocks.stored
        block_bytes = stored.num_read_bytes / max(1, stored.num_read_blocks)
        return seconds, stored.read_blocks_per_s * block_bytes / 1e6


def plain_rate(files: Iterable[Path]) -> float:
    """Return MB/s of reading files one after the other into one buffer."""
    buffer, num_bytes, began_at = bytearray(_READ_BYTES), 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes / (time.perf_counter() - began_at) / 1e6


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Drop files from the system's page cache, after what is not written yet was written."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
