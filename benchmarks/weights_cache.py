"""Loads from slow shared storage, with and without a copy on the node's own disk.

    python -m benchmarks.weights_cache [--model s] [--bytes-per-s 25e6] [--read-s 0.002] --json FILE

The storage is simulated: reads of the model's directory share a bandwidth, and each takes a while at least, as with
a network file system. The model is loaded in this process with one rank.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, make_parser, median, report
from benchmarks.random_models import MODELS, make_model
from quire import LLM
from quire.worker.weights import node_cache


class SlowStorage:
    """A bandwidth that all reads share, and a least time per read."""

    def __init__(self, folder: Path, bytes_per_s: float, read_s: float) -> None:
        self.folder = folder
        self._bytes_per_s = bytes_per_s
        self._read_s = read_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, num_bytes: int) -> None:
        """Wait as long as a read of so many bytes takes."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            at = self._free_at
        time.sleep(max(self._read_s, at - time.monotonic()))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Slow down the reads of this process, by their file descriptors, and let the folder be on another disk."""
        preadv, pread, open_path, device_of = os.preadv, os.pread, Path.open, node_cache._device_of
        storage = self

        def is_slow(fd: int) -> bool:
            return Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(storage.folder)

        def slow_preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
            count = preadv(fd, buffers, offset)
            if is_slow(fd):
                storage.wait_for(count)
            return count

        def slow_pread(fd: int, count: int, offset: int) -> bytes:
            data = pread(fd, count, offset)
            if is_slow(fd):
                storage.wait_for(len(data))
            return data

        def slow_open(path: Path, *arguments: Any, **options: Any) -> Any:
            file = open_path(path, *arguments, **options)
            if not path.is_relative_to(storage.folder) or options.get("buffering") != 0:
                return file
            return _SlowFile(file, storage)

        os.preadv, os.pread, Path.open = slow_preadv, slow_pread, slow_open  # type: ignore[assignment,method-assign]
        node_cache._device_of = lambda path: int(path.is_relative_to(storage.folder))
        try:
            yield
        finally:
            os.preadv, os.pread, Path.open = preadv, pread, open_path  # type: ignore[method-assign]
            node_cache._device_of = device_of


class _SlowFile:
    """An unbuffered file whose `read` takes as long as the storage needs."""

    def __init__(self, file: Any, storage: SlowStorage) -> None:
        self._file = file
        self._storage = storage

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        self._storage.wait_for(len(data))
        return data

    def __enter__(self) -> _SlowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def load_s(model: Path) -> float:
    """Return the seconds that a load of the model takes."""
    begin = time.perf_counter()
    with LLM(model=str(model), device="cpu", num_kv_blocks=64):
        return time.perf_counter() - begin


def measure(model: Path, storage: SlowStorage, caches: Path, rounds: int) -> dict[str, Figure]:
    """Return the medians of the rounds, each of which begins with an empty cache."""
    gigabytes = sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e9
    seconds: dict[str, list[float]] = defaultdict(list)
    load_s(model)  # imports, and the operating system's cache
    for number in range(rounds):
        os.environ.pop(node_cache.FOLDER_VARIABLE, None)
        seconds["local_disk"].append(load_s(model))
        with storage.installed():
            seconds["shared_storage"].append(load_s(model))
            os.environ[node_cache.FOLDER_VARIABLE] = str(caches / str(number))
            seconds["first_copy"].append(load_s(model))
            seconds["from_copy"].append(load_s(model))
    notes = {
        "local_disk": f"{gigabytes:.2f} GB of weights, in the system's cache",
        "shared_storage": "each replica without a cache",
        "first_copy": "the first replica of a node: copied, checked and loaded",
        "from_copy": "later replicas of the node",
    }
    return {f"weights.{name}_s": Figure(median(values), "s", notes[name]) for name, values in seconds.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="s")
    parser.add_argument("--bytes-per-s", type=float, default=25e6)
    parser.add_argument("--read-s", type=float, default=0.002)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        make_model(root / "store" / "model", arguments.model)
        storage = SlowStorage(root / "store", arguments.bytes_per_s, arguments.read_s)
        report(measure(root / "store" / "model", storage, root / "caches", arguments.rounds), arguments.json)


if __name__ == "__main__":
    main()
