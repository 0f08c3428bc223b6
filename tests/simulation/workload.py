"""The simulation's requests, and the client that compares every answer with the fake model's own."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes import EOS, VOCAB_SIZE, beam_oracle, chain, logprobs_of, oracle

from quire.cluster.gateway.routing.request_migration import MigratingRequest
from quire.cluster.text.requests.request import Request
from quire.cluster.text.requests.sequence_update import SequenceUpdate
from quire.proto.errors import ModelNotFound, QuireError
from quire.proto.sampling import SamplingParams
from quire.proto.stream import FinishReason

from .processes import Gateway

# Time in which a client whose gateway crashed or has not heard of the model tries another one.
RETRY_S = 0.2


@dataclass(slots=True)
class Job:
    """A request and what has become of it.

    Attributes:
        expected: output |-> its tokens, from the fake model alone.
        abort_after: tokens after which the client leaves; None if it stays.
        outcome: ``""`` while it runs, then ``complete``, ``aborted`` or the name of the error.
    """

    number: int
    request: Request
    expected: list[list[int]]
    abort_after: int | None = None
    outcome: str = ""
    error: str = ""
    num_attempts: int = 0
    received: list[list[int]] = field(default_factory=list)

    @property
    def may_fail(self) -> bool:
        """Return whether its deadline may end it."""
        return self.request.timeout_s is not None


def make_job(number: int, rng: random.Random, shared: list[int]) -> Job:
    """Return a random request: greedy, several outputs, beams, stop tokens, log-probabilities, deadlines."""
    prompt = shared[: rng.choice((0, 0, 4, 8))] + [
        rng.randrange(EOS + 1, VOCAB_SIZE) for _ in range(rng.randrange(1, 10))
    ]
    max_tokens = rng.randrange(1, 28)
    settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "seed": number}
    stops: tuple[int, ...] = (EOS,)
    kind = rng.random()
    if kind < 0.15:
        settings["n"] = rng.randrange(2, 4)
    elif kind < 0.25:
        settings["n"] = rng.randrange(1, 3)
        settings["beam_width"] = rng.randrange(settings["n"], 4)
    elif kind < 0.4:
        settings["logprobs"] = 0
    elif kind < 0.55:
        extra = rng.randrange(EOS + 1, VOCAB_SIZE)
        settings["stop_token_ids"] = (extra,)
        stops = EOS, extra
    params = SamplingParams(**settings)
    timeout_s = rng.choice((None, None, None, None, None, 0.2, 3.0, 30.0))
    request = Request(
        f"job-{number}", np.array(prompt, np.int32), params, tenant=rng.choice("ab"), timeout_s=timeout_s
    )
    if params.beam_width is None:
        expected = [oracle(prompt, max_tokens, stops)] * params.n
    else:
        expected = beam_oracle(prompt, max_tokens, params.beam_width, params.n, (EOS,))
    abort_after = rng.randrange(0, 4) if rng.random() < 0.07 else None
    return Job(number, request, expected, abort_after)


async def run_job(job: Job, gateways: list[Gateway], rng: random.Random) -> None:
    """Send a request to any gateway until one serves it to its end."""
    while not job.outcome:
        job.num_attempts += 1
        gateway = rng.choice(gateways)
        try:
            stream = gateway.pool.submit(job.request)
        except ModelNotFound:  # it has just started
            await asyncio.sleep(RETRY_S)
            continue
        await _read(job, stream, gateway)
        if not job.outcome:
            await asyncio.sleep(RETRY_S)


async def _read(job: Job, stream: MigratingRequest, gateway: Gateway) -> None:
    """Read a stream until it ends, its client leaves, or its gateway crashes."""
    job.received = [[] for _ in job.expected]
    reading = asyncio.ensure_future(_compare(job, stream))
    crashed = asyncio.ensure_future(gateway.crashed.wait())
    try:
        await asyncio.wait((reading, crashed), return_when=asyncio.FIRST_COMPLETED)
        if crashed.done():
            return  # whatever the gateway said last, its clients have lost it
        job.outcome = reading.result()
    except QuireError as error:
        job.outcome, job.error = type(error).__name__, str(error)
    finally:
        crashed.cancel()
        reading.cancel()
        await asyncio.gather(reading, crashed, return_exceptions=True)
        stream.abort()


async def _compare(job: Job, stream: MigratingRequest) -> str:
    """Return the outcome of a stream. Raises AssertionError at a wrong token, and the stream's error."""
    async for index, update in stream:
        received, expected = job.received[index], job.expected[index]
        received += update.token_ids
        assert received == expected[: len(received)], f"job {job.number}: {received} of {expected}"
        _check_logprobs(job, index, update)
        if update.finish is not None and update.finish.reason is FinishReason.ERROR:
            raise update.finish.to_error()
        if update.finish is not None:
            assert received == expected, (
                f"job {job.number} ended after {len(received)} of {len(expected)} tokens: {update.finish}"
            )
            assert update.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), update.finish
        if job.abort_after is not None and sum(map(len, job.received)) >= job.abort_after:
            return "aborted"
    return "complete"


def _check_logprobs(job: Job, index: int, update: SequenceUpdate) -> None:
    if job.request.sampling.logprobs is None or not update.token_ids:
        return
    assert len(update.logprobs) == len(update.token_ids), f"job {job.number} lacks log-probabilities"
    received = job.received[index]
    known = job.request.prompt_token_ids.tolist() + received[: len(received) - len(update.token_ids)]
    state = b""
    for token_id in known:
        state = chain(state, token_id)
    for token_id, entry in zip(update.token_ids, update.logprobs, strict=True):
        assert entry.chosen == float(logprobs_of(state)[token_id]), (
            f"job {job.number}: a wrong log-probability"
        )
        state = chain(state, token_id)
