"""Mixed work through the servers of gateways, each answer compared with the undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx

from quire.proto.errors import QuireError

from .doors import Door
from .jobs import Answer, Job

REQUEST_TIMEOUT_S = 400.0
# Requests that run at once.
NUM_AT_ONCE = 8


@dataclass(slots=True)
class Tally:
    """Result of the work.

    Attributes:
    """

    num_done: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


class Work:
    """Jobs that are run several at once.

    Args:
        doors: of the gateways; jobs use them in turn.
    """

    def __init__(self, doors: Sequence[Door], jobs: Sequence[Job]) -> None:
        self.tally = Tally()
        self.expected: dict[Job, Answer] = {}
        self._doors = doors
        self._jobs = jobs
        # A gateway keeps the answers of finished requests under their ids, also those of the work before.
        self._name = f"chaos-{secrets.token_hex(4)}"

    async def run_undisturbed(self) -> None:
        """Record the answer of each different job, over gRPC, which shows the most of it."""
        jobs = list(dict.fromkeys(replace(job, door="grpc") for job in self._jobs))
        for first in range(0, len(jobs), NUM_AT_ONCE):
            batch = jobs[first : first + NUM_AT_ONCE]
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answers = await asyncio.gather(*(self._doors[0].answer(job) for job in batch))
            self.expected |= zip(batch, answers, strict=True)

    @property
    def used_token_ids(self) -> set[int]:
        return {token for answer in self.expected.values() for tokens in answer[1] for token in tokens}

    async def run(self, until: asyncio.Future[None]) -> None:
        """Run all jobs, and them again until the future is done; count their outcomes."""
        numbers = itertools.count()

        async def worker() -> None:
            for number in numbers:
                if number >= len(self._jobs) and until.done():
                    return
                await self._run_job(number, self._jobs[number % len(self._jobs)])

        await asyncio.gather(*(worker() for _ in range(NUM_AT_ONCE)))

    async def _run_job(self, number: int, job: Job) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self._doors[number % len(self._doors)].answer(job, f"{self._name}-{number}")
        except (QuireError, httpx.HTTPError, TimeoutError) as error:
            self.tally.lost.append(f"{number} {job}: {_reason(error)}")
            return
        self.tally.num_done += 1
        expected = self.expected[replace(job, door="grpc")][: len(answer)]
        if answer != expected:
            self.tally.changed.append(f"{number} {job}: {answer} instead of {expected}")


def _reason(error: Exception) -> str:
    body = f": {error.response.text[:300]}" if isinstance(error, httpx.HTTPStatusError) else ""
    return f"{error!r}{body}"
