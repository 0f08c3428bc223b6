"""A process that lends blocks, for tests that stop and kill it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from deadlines import READY_TIMEOUT_S
from kv_replicas import GRANT, Replica, await_report, make_config

from quire.proto.kv_transfer import KvReportKind


@dataclass(frozen=True)
class Lender:
    """A process with a replica of `size` ranks, which has granted the lease.

    Attributes:
        endpoints: of its ranks.
    """

    pid: int
    endpoints: tuple[str, ...]

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


@contextmanager
def lender_process(directory: Path, size: int = 1) -> Iterator[Lender]:
    """Run a lender, which has NIXL; kill it at the end."""
    context = multiprocessing.get_context("spawn")
    own, others = context.Pipe()
    process = context.Process(target=_lend, args=(directory, size, others))
    process.start()
    try:
        if not own.poll(READY_TIMEOUT_S):
            raise TimeoutError(f"the lender did not start in {READY_TIMEOUT_S:g} s")
        assert process.pid is not None
        yield Lender(process.pid, own.recv())
    finally:
        process.kill()
        process.join()


def _lend(directory: Path, size: int, channel: Connection) -> None:
    with ExitStack() as stack:
        lending = Replica(make_config(size)).services(stack, directory, has_nixl=True)
        endpoints = tuple(await_report(each, KvReportKind.SERVES).name for each in lending)
        for each in lending:
            each.apply(GRANT)
        channel.send(endpoints)
        channel.recv()
