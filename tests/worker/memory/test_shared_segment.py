"""SharedSegment: memory that outlives its process, private mappings, seals, and addresses that are not valid."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest

from quire.worker.memory.shared_segment import SegmentAddress, SharedSegment

_OWNER = """
import dataclasses, json, sys, threading
from quire.worker.memory.shared_segment import SharedSegment
segment = SharedSegment.create("test", 8192)
segment.write(b"kept", 4096)
memory = segment.map()
memory[:5] = b"first"
print(json.dumps(dataclasses.asdict(segment.address)), flush=True)
threading.Event().wait()
"""


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], SegmentAddress]]:
    """Start a process that has a segment open and mapped."""
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, SegmentAddress(**json.loads(process.stdout.readline()))
        finally:
            process.kill()


def test_dropped_segment_is_closed() -> None:
    segment = SharedSegment.create("test", 4096)
    address = segment.address
    SharedSegment.open(address).close()
    del segment
    with pytest.raises(OSError, match=r"No such file|has .* open, not the segment"):
        SharedSegment.open(address)


def test_opened_segment_outlives_its_process_and_its_address_does_not() -> None:
    with owner() as (process, address):
        segment = SharedSegment.open(address)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(FileNotFoundError):
            SharedSegment.open(address)
    with closing(segment), closing(SharedSegment.open(segment.address)) as again, again.map() as memory:
        assert (memory[:5], memory[4096:4100], len(memory)) == (b"first", b"kept", 8192)


def test_map_shows_writes_of_others_and_map_private_copies_its_own() -> None:
    segment = SharedSegment.create("test", 8192)
    with closing(segment), segment.map() as one, segment.map() as other, segment.map_private() as private:
        one[4096:4100] = b"seen"
        assert other[4096:4100] == private[4096:4100] == b"seen"
        private[4096:4100] = b"mine"
        assert other[4096:4100] == b"seen"


def test_sealed_segment_refuses_writes_and_other_lengths() -> None:
    with closing(SharedSegment.create("test", 1 << 40)) as segment, segment.map_private() as memory:
        segment.write(b"final", 0)
        was_sealed = segment.is_sealed
        segment.seal(4096)
        assert (was_sealed, segment.is_sealed, segment.num_bytes) == (False, True, 4096)
        assert memory[:5] == b"final"
        with closing(SharedSegment.open(segment.address)) as opened:
            for change in (partial(opened.write, b"x", 0), opened.map, partial(opened.seal, 8192)):
                with pytest.raises(PermissionError):
                    change()


def test_seal_is_refused_while_the_segment_is_mapped_for_writes() -> None:
    with closing(SharedSegment.create("test", 4096)) as segment:
        with segment.map(), pytest.raises(OSError, match="busy"):
            segment.seal(4096)
        segment.seal(4096)


def test_open_refuses_another_file_in_the_place_of_the_segment() -> None:
    with closing(SharedSegment.create("test", 4096)) as segment:
        address = segment.address
        for wrong in (
            dataclasses.replace(address, name="quire-test-0"),
            dataclasses.replace(address, num_bytes=8192),
        ):
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(FileNotFoundError, match="segment quire-test-"):
                SharedSegment.open(wrong)
            assert len(os.listdir("/proc/self/fd")) == before


def test_mapping_stays_valid_after_close() -> None:
    segment = SharedSegment.create("test", 4096)
    with segment.map() as memory:
        segment.close()
        segment.close()
        memory[:4] = b"kept"
        assert memory[:4] == b"kept"
        with pytest.raises(ValueError, match="is closed"):
            _ = segment.address


def test_create_refuses_an_impossible_length_and_closes_its_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Invalid argument"):
        SharedSegment.create("test", -1)
    assert len(os.listdir("/proc/self/fd")) == before
