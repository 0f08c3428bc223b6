"""Mixed work through the servers of gateways, each answer compared with the undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from quire import AsyncClient, SamplingParams
from quire.cluster.requests.outputs import CompletionDelta, CompletionFinished
from quire.proto.errors import QuireError, ServerUnreachable, ShuttingDown

PROMPTS = "It was", "The captain of the ship", "Call me", "There is a", "Of the whale he said that"
NUM_TOKENS = 40
REQUEST_TIMEOUT_S = 180.0
# Requests that run at once.
NUM_AT_ONCE = 8
REPEAT_DELAY_S = 0.5


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, as both servers take it.

    Attributes:
        over_http: settings of ``/v1/completions``; None for a kind that only gRPC has.
    """

    params: SamplingParams
    over_http: dict[str, Any] | None


def _kind(*, is_http: bool = True, **settings: Any) -> Kind:
    params = SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | settings))
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **settings}
    return Kind(params, {**body, "stop": list(body.get("stop", ()))} if is_http else None)


KINDS: dict[str, Kind] = {
    "greedy": _kind(temperature=0.0),
    "seed": _kind(temperature=0.9, seed=11),
    "n": _kind(temperature=0.8, seed=5, n=3),
    "penalties": _kind(temperature=0.7, seed=3, repetition_penalty=1.2, presence_penalty=0.3),
    "stop": _kind(temperature=0.9, seed=2, stop=(" the",)),
    "logprobs": _kind(is_http=False, temperature=0.0, logprobs=3),
    "beams": _kind(is_http=False, beam_width=3, n=2, max_tokens=24),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the work.

    Attributes:
        door: ``grpc``, ``http`` or ``http-stream``.
    """

    kind: str
    prompt: str
    door: str


# Of all outputs: the texts; over gRPC also the tokens, their log-probabilities, rounded, and the finish reasons.
Answer = list[Any]


def make_jobs(count: int, rng: random.Random) -> list[Job]:
    """Return random requests of all kinds through all doors."""
    jobs = []
    for _ in range(count):
        name = rng.choice(tuple(KINDS))
        doors = ("grpc",) if KINDS[name].over_http is None else ("grpc", "http", "http-stream")
        jobs.append(Job(name, rng.choice(PROMPTS), rng.choice(doors)))
    return jobs


@dataclass(slots=True)
class Tally:
    """Result of the work.

    Attributes:
        num_repeated: calls that were sent again to another gateway after theirs had ended.
    """

    num_done: int = 0
    num_repeated: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


class Door:
    """Clients of one gateway's two servers. Calls raise ServerUnreachable if the connection breaks for good."""

    def __init__(self, grpc_client: AsyncClient, http_client: httpx.AsyncClient) -> None:
        self.connect(grpc_client, http_client)

    def connect(self, grpc_client: AsyncClient, http_client: httpx.AsyncClient) -> None:
        """Use these clients from now on: another gateway has taken the place of the first."""
        self._grpc = grpc_client
        self._http = http_client

    async def answer(self, job: Job, request_id: str = "") -> Answer:
        """Return the answer to a job. Raises QuireError, httpx.HTTPError or TimeoutError if there is none."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            if job.door == "grpc":
                return await self._over_grpc(job, request_id)
            try:
                return await self._over_http(job, is_stream=job.door == "http-stream")
            except httpx.TransportError as error:
                raise ServerUnreachable(repr(error)) from error

    async def _over_grpc(self, job: Job, request_id: str) -> Answer:
        params = KINDS[job.kind].params
        texts, tokens = ["" for _ in range(params.n)], [list[int]() for _ in range(params.n)]
        logprobs = [list[float]() for _ in range(params.n)]
        reasons = ["" for _ in range(params.n)]
        options: dict[str, Any] = {"request_id": request_id} if request_id else {}
        async for event in self._grpc.generate_stream(job.prompt, params, **options):
            if isinstance(event, CompletionDelta):
                texts[event.index] += event.text
                tokens[event.index] += event.token_ids
                positions = zip(event.token_ids, event.logprobs, strict=False)
                logprobs[event.index] += [round(entry[token].logprob, 3) for token, entry in positions]
            elif isinstance(event, CompletionFinished):
                reasons[event.index] = event.finish_reason
        return [texts, tokens, logprobs, reasons]

    async def _over_http(self, job: Job, *, is_stream: bool) -> Answer:
        settings = KINDS[job.kind].over_http
        assert settings is not None, f"{job.kind} is not a kind of HTTP"
        body = {"model": "demo", "prompt": job.prompt, "stream": is_stream, **settings}
        texts = ["" for _ in range(settings.get("n", 1))]
        if not is_stream:
            response = await self._http.post("/v1/completions", json=body)
            response.raise_for_status()
            for choice in response.json()["choices"]:
                texts[choice["index"]] = choice["text"]
            return [texts]
        is_whole = False
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    content = json.loads(line.removeprefix("data: "))
                    if "error" in content:
                        raise httpx.HTTPError(str(content["error"]))
                    for choice in content["choices"]:
                        texts[choice["index"]] += choice["text"]
        if not is_whole:
            raise httpx.ReadError("the stream ended without its last event")
        return [texts]


class Work:
    """Jobs that are run several at once.

    Args:
        doors: of the gateways; jobs use them in turn.
        may_repeat: a caller whose gateway has ended sends its call to the next one.
    """

    def __init__(self, doors: Sequence[Door], jobs: Sequence[Job], *, may_repeat: bool) -> None:
        self.tally = Tally()
        self.expected: dict[Job, Answer] = {}
        self._doors = doors
        self._jobs = jobs
        self._may_repeat = may_repeat
        # A gateway keeps the answers of finished requests under their ids, also those of the work before.
        self._name = f"chaos-{secrets.token_hex(4)}"

    async def run_undisturbed(self) -> None:
        """Record the answer of each different job, over gRPC, which shows the most of it."""
        jobs = list(dict.fromkeys(replace(job, door="grpc") for job in self._jobs))
        for first in range(0, len(jobs), NUM_AT_ONCE):
            batch = jobs[first : first + NUM_AT_ONCE]
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
            answer = await self._answer(number, job)
        except (QuireError, httpx.HTTPError, TimeoutError) as error:
            self.tally.lost.append(f"{number} {job}: {_reason(error)}")
            return
        self.tally.num_done += 1
        expected = self.expected[replace(job, door="grpc")][: len(answer)]
        if answer != expected:
            self.tally.changed.append(f"{number} {job}: {answer} instead of {expected}")

    async def _answer(self, number: int, job: Job) -> Answer:
        request_id = f"{self._name}-{number}"
        if not self._may_repeat:
            return await self._doors[0].answer(job, request_id)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            for attempt in itertools.count(number):
                try:
                    return await self._doors[attempt % len(self._doors)].answer(job, request_id)
                except (ServerUnreachable, ShuttingDown):
                    self.tally.num_repeated += 1
                    await asyncio.sleep(REPEAT_DELAY_S)
        raise AssertionError("unreachable")


def _reason(error: Exception) -> str:
    body = f": {error.response.text[:300]}" if isinstance(error, httpx.HTTPStatusError) else ""
    return f"{error!r}{body}"
