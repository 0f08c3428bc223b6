"""Random blocks of KV, and the blocks that a KvDirectory reads and that are what their names say."""

from __future__ import annotations

import numpy as np

from quire.worker.memory.kv_directory import KvDirectory


def random_blocks(block_bytes: int, count: int, seed: int = 0) -> dict[bytes, memoryview]:
    """Return name |-> content."""
    random = np.random.default_rng(seed)
    return {bytes(4) + random.bytes(32): memoryview(random.bytes(block_bytes)) for _ in range(count)}


def read_genuine(block_bytes: int, directory: KvDirectory, keys: list[bytes]) -> dict[bytes, bytes]:
    """Return name |-> content of the blocks that are read and are genuine."""
    found = dict[bytes, bytes]()
    for read in directory.read(keys):
        for index, (key, tag) in enumerate(zip(read.keys, read.tags, strict=True)):
            content = read.content[index * block_bytes : (index + 1) * block_bytes]
            if directory.is_genuine(key, tag, content):
                found[key] = bytes(content)
    return found
