"""available_kv_bytes: memory of a GPU for the KV cache."""

from __future__ import annotations

from quire.worker.rank.kv_budget import available_kv_bytes


def test_available_kv_bytes_excludes_other_processes() -> None:
    gib = 1 << 30
    assert available_kv_bytes(80 * gib, 60 * gib, 20 * gib, 20 * gib, 0.9) == 52 * gib
    # Another process has 10 GiB; the peak is above what is reserved now.
    assert available_kv_bytes(80 * gib, 50 * gib, 20 * gib, 22 * gib, 0.9) == 40 * gib
    # Another process ended during the profile run: `free + reserved` exceeds the total.
    assert available_kv_bytes(80 * gib, 79 * gib, 20 * gib, 20 * gib, 0.9) == 52 * gib
    assert available_kv_bytes(80 * gib, 1 * gib, 20 * gib, 20 * gib, 0.9) == 0
