"""StoredBlocks: carries out the scheduler's orders to write host blocks and states to files and to read them.

Each tier has a thread, so that a file system that hangs stops neither the steps nor the other tier. A thread touches
the host memory only under a lock and only while its order is of the present generation: content goes through a
buffer of the thread. So an order that comes back late, after the memory was given to others, changes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...proto.config import EngineConfig
from ...proto.errors import in_one_line
from ...proto.kv_layout import layout_of
from ...proto.model.parallel_split import ParallelSplit
from ...proto.model.registry import kv_range
from ...proto.step import StepPlan
from ...proto.stored_kv import KEY_BYTES, TIERS, StoredOrder, StoredReport, is_state, split_keys
from .cache_engine import state_layouts
from .kv_directory import Changes, KvDirectory, ReadBlocks, read_key

_log = logging.getLogger(__name__)

# A step without anything to compute waits this long for news of an order: the scheduler plans such steps, one after
# the other, while nothing else runs. A request that arrives meanwhile waits as long at most.
IDLE_WAIT_S = 0.01
# After a write that failed, nothing is written for this time: a full disk is not tried for each block.
WRITE_PAUSE_S = 30.0
# A shared directory is looked through this often: no file system tells about files that another host writes.
RESCAN_S = 10.0
# Keys in one report: 0.3 MB, which the scheduler takes in within a few ms.
MAX_REPORTED_KEYS = 1 << 13
# Reads whose content is verified at once, by so many threads: each copies 5 GB/s on Zen 4.
_NUM_VERIFIED, _NUM_VERIFIERS = 4, 2


class HostBlocks:
    """The host memory of a cache, block by block, as bytes.

    Args:
        parts: tensors [places, blocks, length] in host memory; none for a rank that has no layer of the kind, which
            reads and writes a byte for each block as the others do theirs.

    Attributes:
        block_bytes: length of a block.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = [_as_bytes(part) for part in parts]
        self._ends = np.cumsum([len(part) * part.shape[2] for part in self._parts]).tolist()
        self.block_bytes: int = self._ends[-1] if self._ends else 1

    def copy_out(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """Copy a block into `content`, [block_bytes]."""
        for part, start, end in zip(self._parts, [0, *self._ends], self._ends, strict=False):
            content[start:end].reshape(len(part), -1)[:] = part[:, block]

    def copy_in(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """Copy `content`, [block_bytes], into a block."""
        for part, start, end in zip(self._parts, [0, *self._ends], self._ends, strict=False):
            part[:, block] = content[start:end].reshape(len(part), -1)


class HostMemory:
    """Host memory of a rank: blocks, and the states of a model whose layers keep some.

    Args:
        states: tensors [slots, ...].
    """

    def __init__(self, parts: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self.blocks = HostBlocks(parts)
        self.states = HostBlocks([each.view(1, len(each), -1) for each in states])

    def of(self, key: bytes) -> HostBlocks:
        """Return the memory of what a key names."""
        return self.states if is_state(key) else self.blocks


def _as_bytes(part: Tensor) -> npt.NDArray[np.uint8]:
    return np.asarray(part.view(torch.uint8).numpy())


@dataclass(slots=True, eq=False)
class _Order:
    """An order under way.

    Attributes:
        is_ready: waits until the host blocks have what is to be written.
        num_parts: tiers that have not done their part.
        done: positions that were read, or written to a tier.
    """

    order: StoredOrder
    generation: int
    is_ready: Callable[[], None]
    keys: list[bytes]
    num_parts: int = 0
    done: set[int] = field(default_factory=set)
    num_corrupt: int = 0
    began_at: float = field(default_factory=time.monotonic)


class StoredBlocks:
    """The tiers of one rank. For one thread, beside its own.

    Args:
        directories: of each tier; None for a tier that is off.
        memory: of the host blocks and states.
    """

    def __init__(self, rank: int, directories: Sequence[KvDirectory | None], memory: HostMemory) -> None:
        self._rank, self._memory = rank, memory
        self._lock = threading.Lock()  # guards the generation, the host memory, orders and reports
        self._generation = 1
        self._num_awaited = len(directories) - list(directories).count(None)  # orders and indexes under way
        self._reports: deque[StoredReport] = deque()
        self._has_news = threading.Event()
        self._tiers = [
            _Tier(self, number, directory)
            for number, directory in enumerate(directories)
            if directory is not None
        ]
        for tier in self._tiers:
            tier.begin_index(self._generation)

    def apply(self, plan: StepPlan, is_ready: Callable[[], None]) -> None:
        """Begin the plan's orders, after its blocks were moved.

        Args:
            is_ready: waits until these moves are done.
        """
        for order in plan.stored_orders:
            started = _Order(order, self._generation, is_ready, split_keys(order.keys))
            with self._lock:
                self._num_awaited += 1
            parts = self._parts_of(started)
            started.num_parts = len(parts)
            for tier, positions in parts:
                tier.begin(started, positions)
            if not parts:
                with self._lock:
                    self._end(started)

    def _parts_of(self, order: _Order) -> list[tuple[_Tier, list[int]]]:
        """Return the positions for each tier: of a write all for each, of a read those that it has first."""
        if not order.order.is_read:
            return [(tier, list(range(len(order.keys)))) for tier in self._tiers]
        parts, left = list[tuple[_Tier, list[int]]](), list(range(len(order.keys)))
        for tier in self._tiers:
            own = [position for position in left if order.keys[position] in tier.directory]
            left = [position for position in left if order.keys[position] not in tier.directory]
            if own:
                parts.append((tier, own))
        return parts

    def take_reports(self, *, is_idle: bool) -> tuple[StoredReport, ...]:
        """Return the news since the last call; an idle step waits a moment for them while orders are under way."""
        if is_idle and self._num_awaited:
            self._has_news.wait(IDLE_WAIT_S)
        if not self._reports:  # as in most steps
            return ()
        with self._lock:
            self._has_news.clear()
            taken, num_keys = list[StoredReport](), 0
            while self._reports and num_keys < MAX_REPORTED_KEYS:
                taken.append(self._reports.popleft())
                num_keys += (len(taken[-1].added) + len(taken[-1].removed)) // KEY_BYTES
            return tuple(taken)

    def reset(self, memory: HostMemory | None) -> None:
        """Drop all orders, and report everything anew: the scheduler starts over.

        Args:
            memory: of the host blocks and states from now on; None while there is none.
        """
        with self._lock:
            self._generation += 1
            self._num_awaited = 0 if memory is None else len(self._tiers)
            self._reports.clear()
            self._has_news.clear()
            if memory is not None:
                self._memory = memory
        if memory is not None:
            for tier in self._tiers:
                tier.begin_index(self._generation)

    def close(self) -> None:
        """Drop all orders; the threads end after what they do now. Safe to call twice."""
        self.reset(None)
        for tier in self._tiers:
            tier.close()

    # For the tiers' threads

    @contextmanager
    def memory_of(self, generation: int) -> Iterator[HostMemory]:
        """Give access to the host memory; raises _Outdated if the generation is over."""
        with self._lock:
            if generation != self._generation:
                raise _Outdated
            yield self._memory

    def report(self, generation: int, report: StoredReport) -> None:
        with self._lock:
            if generation == self._generation:
                self._reports.append(report)
                self._num_awaited -= report.is_whole
                self._has_news.set()

    def report_changes(
        self, generation: int, tier: _Tier, changes: Changes, *, is_whole: bool = False
    ) -> None:
        """Report blocks that a tier has or has no more.

        All that were removed are told before the first that was added: a block whose file was deleted may be in a
        new one.
        """
        rank, number = self._rank, tier.number
        reports = [StoredReport(rank, number, removed=keys) for keys in _joined(changes.removed)]
        reports += [StoredReport(rank, number, added=keys) for keys in _joined(changes.added)]
        if is_whole and not reports:
            reports.append(StoredReport(rank, number))
        for position, report in enumerate(reports, 1):
            is_last = position == len(reports)
            self.report(
                generation,
                replace(report, is_whole=is_whole and is_last, tier_bytes=tier.directory.num_bytes),
            )

    def end_part(self, order: _Order, done: set[int], num_corrupt: int) -> None:
        """Count one tier's part of an order, and report the order with the last one."""
        with self._lock:
            if order.generation != self._generation:
                return
            order.done |= done
            order.num_corrupt += num_corrupt
            order.num_parts -= 1
            if order.num_parts <= 0:
                self._end(order)

    def _end(self, order: _Order) -> None:
        failed = [position for position in range(len(order.keys)) if position not in order.done]
        self._num_awaited -= 1
        self._reports.append(
            StoredReport(
                self._rank,
                order_id=order.order.order_id,
                failed=np.array(failed, np.int32),
                num_corrupt=order.num_corrupt,
                num_bytes=sum(self._memory.of(order.keys[position]).block_bytes for position in order.done),
                seconds=time.monotonic() - order.began_at,
            )
        )
        self._has_news.set()


def _joined(keys: list[bytes]) -> Iterator[bytes]:
    """Yield keys one after the other, as many at once as a report may have."""
    for start in range(0, len(keys), MAX_REPORTED_KEYS):
        yield b"".join(keys[start : start + MAX_REPORTED_KEYS])


class NoStoredBlocks(StoredBlocks):
    """A rank without tiers."""

    def __init__(self) -> None:
        pass

    def apply(self, plan: StepPlan, is_ready: Callable[[], None]) -> None:
        pass

    def take_reports(self, *, is_idle: bool) -> tuple[StoredReport, ...]:
        return ()

    def reset(self, memory: HostMemory | None) -> None:
        pass

    def close(self) -> None:
        pass


def open_stored_blocks(
    config: EngineConfig, rank: int, weights_digest: int, memory: HostMemory
) -> StoredBlocks:
    """Open the tiers that the configuration names; none if there is none.

    Args:
        weights_digest: of the files that the rank has loaded.
        memory: of its host blocks and states.

    Raises:
        ConfigError: a directory or the key cannot be used.
    """
    if not config.kv_directories:
        return NoStoredBlocks()
    split, version = ParallelSplit.of(config.parallel), _version_of(config, weights_digest)
    stage, place = split.stage_of(rank), split.place_of(rank)
    states = state_layouts(config, stage)
    layout = layout_of(config, place.tensor, version, kv_range(config.model, stage), states).fingerprint
    lengths = [memory.blocks.block_bytes, *([memory.states.block_bytes] if config.model.has_states else [])]
    key = read_key(Path(config.cache.kv_key) if config.cache.kv_key else _default_key_path())
    directories = [
        None if path is None else KvDirectory.open(*path, layout, lengths, key)
        for path in config.kv_directories
    ]
    return StoredBlocks(rank, directories, memory)


def _version_of(config: EngineConfig, weights_digest: int) -> str:
    """Return a name of everything, beside the layout, that the content of a block depends on.

    The digest of the weights' files says nothing of config.json, nor of what is made of the weights when they load.
    """
    model, parallel = config.model, config.parallel
    draft = config.speculative_draft
    settings = (
        {name: value for name, value in sorted(model.hf.items()) if not name.startswith("_")},
        (model.architecture, model.dtype, model.quantization, model.layer_windows),
        None if draft is None else (draft.path, draft.dtype, draft.quantization),
        (parallel.device, parallel.enable_expert_parallel),
    )
    told = sha256(repr(settings).encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{weights_digest & (1 << 64) - 1:016x}-{told}"


def _default_key_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "quire" / "kv.key"


class _Outdated(Exception):
    """The order is of an earlier generation."""


class _Tier:
    """One tier and its thread."""

    def __init__(self, owner: StoredBlocks, number: int, directory: KvDirectory) -> None:
        self.number, self.directory = number, directory
        self._owner = owner
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._verifiers = ThreadPoolExecutor(_NUM_VERIFIERS, f"verify-{TIERS[number]}")
        self._rescan_s = RESCAN_S if TIERS[number] == "shared" else None
        self._generation = 1
        self._paused_until = 0.0
        self._num_warned_foreign = 0
        threading.Thread(target=self._run, name=f"kv-{TIERS[number]}", daemon=True).start()

    def begin_index(self, generation: int) -> None:
        """Report all blocks."""
        self._jobs.put(lambda: self._report_index(generation))

    def begin(self, order: _Order, positions: list[int]) -> None:
        self._jobs.put(lambda: self._carry_out(order, positions))

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._rescan_s)
                if job is None:
                    break
                job()
            except Empty:
                self._rescan()
            except _Outdated:
                continue
            except Exception:
                _log.exception("the KV tier in %s failed unexpectedly", self.directory.path)
        self._verifiers.shutdown(cancel_futures=True)

    def _carry_out(self, order: _Order, positions: list[int]) -> None:
        carry_out = self._read if order.order.is_read else self._write
        try:
            carry_out(order, positions)
        except _Outdated:
            raise
        except Exception:
            _log.exception("the KV tier in %s failed unexpectedly", self.directory.path)
            self._owner.end_part(order, set(), 0)

    def _scan(self) -> Changes:
        try:
            changes = self.directory.scan()
        except OSError as error:
            _log.warning("%s cannot be read: %s", self.directory.path, error)
            return Changes()
        num_foreign = self.directory.num_foreign_files
        if num_foreign > self._num_warned_foreign:
            _log.warning(
                "%s has %d files that are damaged or were written with another key: they are not used",
                self.directory.path,
                num_foreign,
            )
        self._num_warned_foreign = num_foreign
        return changes

    def _report_index(self, generation: int) -> None:
        self._generation = generation
        self._scan()
        whole = Changes(added=self.directory.keys())
        self._owner.report_changes(generation, self, whole, is_whole=True)

    def _rescan(self) -> None:
        self._owner.report_changes(self._generation, self, self._scan())

    # Reads

    def _read(self, order: _Order, positions: list[int]) -> None:
        place_of = {order.keys[position]: position for position in positions}
        done, corrupt, verified = set[int](), list[bytes](), deque[Future[tuple[list[int], list[bytes]]]]()

        def collect() -> None:
            good, bad = verified.popleft().result()
            done.update(good)
            corrupt.extend(bad)

        try:
            for read in self.directory.read(list(place_of)):
                verified.append(self._verifiers.submit(self._take_in, order, place_of, read))
                if len(verified) >= _NUM_VERIFIED:
                    collect()
        finally:
            while verified:
                collect()
        if corrupt:
            _log.warning("%s has %d blocks that are not genuine: computed", self.directory.path, len(corrupt))
        for key in corrupt:
            self.directory.forget_block(key)
        lost = [order.keys[position] for position in positions if position not in done]
        lost += self.directory.take_lost()
        self._owner.report_changes(order.generation, self, Changes(removed=lost))
        self._owner.end_part(order, done, len(corrupt))

    def _take_in(
        self, order: _Order, place_of: dict[bytes, int], read: ReadBlocks
    ) -> tuple[list[int], list[bytes]]:
        """Verify blocks and copy them into host memory; return the positions of the good ones and the bad keys."""
        good, bad, length = list[int](), list[bytes](), len(read.content) // len(read.keys)
        for index, (key, tag) in enumerate(zip(read.keys, read.tags, strict=True)):
            content = read.content[index * length : (index + 1) * length]
            if not self.directory.is_genuine(key, tag, content):
                bad.append(key)
                continue
            position = place_of[key]
            with self._owner.memory_of(order.generation) as memory:
                host_block = int(order.order.host_blocks[position])
                memory.of(key).copy_in(host_block, np.frombuffer(content, np.uint8))
            good.append(position)
        return good, bad

    # Writes

    def _write(self, order: _Order, positions: list[int]) -> None:
        order.is_ready()
        done = {position for position in positions if order.keys[position] in self.directory}
        for chosen in self._files_of(order, [position for position in positions if position not in done]):
            if time.monotonic() < self._paused_until or not self._write_file(order, chosen):
                break
            done.update(chosen)
        self._owner.end_part(order, done, 0)

    def _files_of(self, order: _Order, positions: list[int]) -> Iterator[list[int]]:
        """Yield positions whose blocks go into a file: those of blocks, then those of states."""
        for kind in (False, True):
            own = [position for position in positions if is_state(order.keys[position]) == kind]
            if not own:
                continue
            with self._owner.memory_of(order.generation) as memory:
                most = self.directory.max_blocks_per_file(memory.of(order.keys[own[0]]).block_bytes)
            for start in range(0, len(own), most):
                yield own[start : start + most]

    def _write_file(self, order: _Order, positions: list[int]) -> bool:
        """Write some blocks; return whether they were written."""
        blocks = list[tuple[bytes, memoryview]]()
        for position in positions:
            key, host_block = order.keys[position], int(order.order.host_blocks[position])
            with self._owner.memory_of(order.generation) as memory:
                own = memory.of(key)
                content = bytearray(own.block_bytes)
                own.copy_out(host_block, np.frombuffer(content, np.uint8))
            blocks.append((key, memoryview(content)))
        try:
            changes = self.directory.write(blocks)
        except OSError as error:
            self._paused_until = time.monotonic() + WRITE_PAUSE_S
            _log.warning(
                "KV is not written to %s for %g s: %s", self.directory.path, WRITE_PAUSE_S, in_one_line(error)
            )
            return False
        self._owner.report_changes(order.generation, self, changes)
        return True
