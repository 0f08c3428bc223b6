"""KvDirectory: what is read is what was written, and files stay within their bound, whoever writes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import kv_blocks
import pytest
import torch
from kv_blocks import random_blocks, read_genuine

from quire.proto.stored_kv import split_keys
from quire.worker.memory import kv_directory, stored_blocks
from quire.worker.memory.block_files import NoRoom
from quire.worker.memory.kv_directory import Changes, KvDirectory
from quire.worker.memory.stored_blocks import HostMemory, StoredBlocks

BLOCK_BYTES, STATE_BYTES = 8192, 3 << 20
LAYOUT, KEY = b"l" * 16, b"k" * 32
make_blocks, genuine = partial(random_blocks, BLOCK_BYTES), partial(read_genuine, BLOCK_BYTES)


def open_directory(path: Path, max_bytes: int = 1 << 30, key: bytes = KEY) -> KvDirectory:
    directory = KvDirectory.open(str(path), max_bytes, LAYOUT, [BLOCK_BYTES, STATE_BYTES], key)
    directory.scan()
    return directory


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("quire-kv/*/*.kv"))


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("quire-kv/*/*"))


def test_blocks_are_found_by_another_process(tmp_path: Path) -> None:
    blocks = make_blocks(9)
    open_directory(tmp_path).write(list(blocks.items()))
    assert genuine(open_directory(tmp_path), list(blocks)) == blocks


def test_states_have_files_of_their_own_within_one_bound(tmp_path: Path) -> None:
    bound, directory = 8 << 20, open_directory(tmp_path, 8 << 20)
    blocks, states = make_blocks(9), random_blocks(STATE_BYTES, 3)
    directory.write(list(blocks.items()))
    for state in states.items():
        directory.write([state])
    assert len(files_of(tmp_path)) == 2, "the oldest files had to leave"
    assert bytes_of(tmp_path) <= bound
    again, newest = open_directory(tmp_path), list(states)[1:]
    assert read_genuine(STATE_BYTES, again, newest) == {key: states[key] for key in newest}
    assert not genuine(again, list(blocks))


def test_all_blocks_of_a_file_that_is_gone_are_told(tmp_path: Path) -> None:
    blocks = make_blocks(3)
    directory = open_directory(tmp_path)
    directory.write(list(blocks.items()))
    (file,) = files_of(tmp_path)
    file.unlink()
    assert not genuine(directory, list(blocks)[:1])
    assert set(directory.take_lost()) == set(blocks)
    assert directory.take_lost() == []


def test_block_that_moved_to_another_file_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_blocks, "MAX_REPORTED_KEYS", 2)
    directory = open_directory(tmp_path)
    stored = StoredBlocks(
        0, [directory, None], HostMemory([torch.zeros(1, 2, BLOCK_BYTES, dtype=torch.uint8)], [])
    )
    (tier,) = stored._tiers
    keys = list(make_blocks(4))
    stored.report_changes(1, tier, Changes(added=keys[-1:], removed=keys))
    known = set(keys)
    while known != {keys[-1]}:
        reports = stored.take_reports(is_idle=True)
        for report in reports:  # as the scheduler does
            known -= set(split_keys(report.removed))
            known |= set(split_keys(report.added))
        assert reports or known == {keys[-1]}
    stored.close()


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    blocks = make_blocks(3)
    open_directory(tmp_path).write(list(blocks.items()))
    other = open_directory(tmp_path, key=b"o" * 32)
    assert not other.keys()
    assert other.num_foreign_files == 1


@pytest.mark.parametrize("place", [0, BLOCK_BYTES - 1])
def test_changed_block_is_not_genuine(tmp_path: Path, place: int) -> None:
    blocks = make_blocks(3)
    open_directory(tmp_path).write(list(blocks.items()))
    (file,) = files_of(tmp_path)
    content = bytearray(file.read_bytes())
    content[place - BLOCK_BYTES] ^= 1  # in the last block
    file.write_bytes(content)
    assert set(genuine(open_directory(tmp_path), list(blocks))) == set(list(blocks)[:-1])


def test_exchanged_blocks_are_not_genuine(tmp_path: Path) -> None:
    blocks = make_blocks(2)
    open_directory(tmp_path).write(list(blocks.items()))
    (file,) = files_of(tmp_path)
    content = bytearray(file.read_bytes())
    first, second = content[-2 * BLOCK_BYTES : -BLOCK_BYTES], content[-BLOCK_BYTES:]
    content[-2 * BLOCK_BYTES :] = second + first
    file.write_bytes(content)
    assert not genuine(open_directory(tmp_path), list(blocks))


def test_file_that_vanishes_or_is_cut_is_forgotten(tmp_path: Path) -> None:
    blocks = [make_blocks(kv_directory.MIN_FILE_BYTES // BLOCK_BYTES, seed) for seed in range(2)]
    directory = open_directory(tmp_path)
    for each in blocks:
        directory.write(list(each.items()))
    first, second = files_of(tmp_path)
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    keys = [*blocks[0], *blocks[1]]
    found = genuine(directory, keys)
    assert len(found) < len(blocks[0])  # those of the file that was cut, up to the cut at most
    assert not set(directory.keys()) - set(found)


def test_files_of_two_servers_stay_within_the_bound(tmp_path: Path) -> None:
    num_blocks = kv_directory.MIN_FILE_BYTES // BLOCK_BYTES
    bound = 5 * kv_directory.MIN_FILE_BYTES
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            # A file that is renamed or deleted while the directory is listed is counted twice or not at all.
            try:
                most[0] = max(most[0], sum(each.stat().st_size for each in files_of(tmp_path)))
            except FileNotFoundError:
                continue

    def write(seed: int) -> None:
        directory = open_directory(tmp_path, bound)
        for number in range(12):
            try:
                directory.write(list(make_blocks(num_blocks, 100 * seed + number).items()))
            except NoRoom:
                continue  # the other one has reserved what is left

    watcher = threading.Thread(target=watch)
    watcher.start()
    writers = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join(120)
    is_over.set()
    watcher.join(120)
    assert bytes_of(tmp_path) <= bound
    assert most[0] <= bound
    assert files_of(tmp_path)


@pytest.fixture
def limit_of_files() -> Iterator[int]:
    """Limit the length of files of this process, so that a write fails halfway as on a full disk."""
    limit, (soft, hard) = 64 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_write_leaves_nothing_and_reads_go_on(tmp_path: Path, limit_of_files: int) -> None:
    blocks, more = make_blocks(2), make_blocks(2 * limit_of_files // BLOCK_BYTES, 1)
    directory = open_directory(tmp_path)
    directory.write(list(blocks.items()))
    with pytest.raises(OSError, match="File too large"):
        directory.write(list(more.items()))
    assert genuine(directory, [*blocks, *more]) == blocks
    assert not list(tmp_path.glob("quire-kv/*/.*"))


_FILL = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import test_kv_directory as tests
place = Path(sys.argv[1])
blocks, more = tests.make_blocks(8), tests.make_blocks(512, 1)
directory = tests.open_directory(place)
directory.write(list(blocks.items()))
try:
    directory.write(list(more.items()))
    print("written")
except OSError as error:
    print(error.strerror)
print(tests.genuine(directory, [*blocks, *more]) == blocks, list(place.glob("quire-kv/*/.*")))
print(len(tests.genuine(tests.open_directory(place), list(blocks))))
"""


def test_full_file_system_keeps_what_it_has(tmp_path: Path) -> None:
    """The file system is a tmpfs of 1 MiB in a namespace of its own, where the machine lets one be made."""
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$0" && exec "$@"',
        str(tmp_path),
    ]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets users mount nothing")
    folders = Path(__file__).parent, Path(kv_blocks.__file__).parent
    done = subprocess.run(
        [*command, sys.executable, "-c", _FILL, str(tmp_path), *map(str, folders)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["No space left on device", "True []", "8"], done.stderr
