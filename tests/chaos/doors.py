"""Door: callers of one gateway, which continue at another one when theirs has ended."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import httpx

from quire import AsyncClient
from quire.cluster.text.requests.outputs import CompletionDelta, CompletionFinished

from .jobs import KINDS, Answer, Job

RECONNECT_DELAY_S = 0.2


class Door:
    """Callers of one gateway, over gRPC and HTTP.

    A call with a request_id whose connection breaks is continued, by the next gateway if there are several.
    """

    def __init__(self, grpc_client: AsyncClient, http_clients: Sequence[httpx.AsyncClient]) -> None:
        self.connect(grpc_client, http_clients)

    def connect(self, grpc_client: AsyncClient, http_clients: Sequence[httpx.AsyncClient]) -> None:
        """Use these clients for new calls: another gateway has taken the place of the first.

        Args:
            grpc_client: of all gateways.
            http_clients: one per gateway.
        """
        self._grpc = grpc_client
        self._http = tuple(http_clients)

    async def answer(self, job: Job, request_id: str = "") -> Answer:
        """Return the answer to a job. Raises QuireError or httpx.HTTPError if there is none."""
        if job.door == "grpc":
            return await self._over_grpc(job, request_id)
        return await self._over_http(_HttpCall(job, request_id))

    async def _over_grpc(self, job: Job, request_id: str) -> Answer:
        kind = KINDS[job.kind]
        params = kind.params
        texts, tokens = ["" for _ in range(params.n)], [list[int]() for _ in range(params.n)]
        logprobs = [list[float]() for _ in range(params.n)]
        reasons = ["" for _ in range(params.n)]
        options: dict[str, Any] = {"model": kind.model} | ({"request_id": request_id} if request_id else {})
        async for event in self._grpc.generate_stream(job.prompt, params, **options):
            if isinstance(event, CompletionDelta):
                texts[event.index] += event.text
                tokens[event.index] += event.token_ids
                positions = zip(event.token_ids, event.logprobs, strict=False)
                logprobs[event.index] += [round(entry[token].logprob, 3) for token, entry in positions]
            elif isinstance(event, CompletionFinished):
                reasons[event.index] = event.finish_reason
        return [texts, tokens, logprobs, reasons]

    async def _over_http(self, call: _HttpCall) -> Answer:
        for client in itertools.cycle(self._http):
            try:
                await call.send(client)
                return [call.texts]
            except httpx.TransportError:
                if not call.is_resumable:
                    raise
            except httpx.HTTPStatusError as error:  # 503: the gateway shuts down
                if not call.is_resumable or error.response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
            await asyncio.sleep(RECONNECT_DELAY_S)
        raise AssertionError("a door has a client")


class _HttpCall:
    """A call of `/v1/completions` across its connections.

    Attributes:
        texts: of the outputs, as far as they were received.
    """

    def __init__(self, job: Job, request_id: str) -> None:
        settings = KINDS[job.kind].over_http
        assert settings is not None, f"{job.kind} is not a kind of HTTP"
        self.is_resumable = bool(request_id)
        self.texts = ["" for _ in range(settings.get("n", 1))]
        self._is_stream = job.door == "http-stream"
        self._last_event_id = ""
        self._body = {"prompt": job.prompt, "stream": self._is_stream, **settings}
        if self.is_resumable:
            self._body |= {"request_id": request_id, "resumable": True}

    async def send(self, client: httpx.AsyncClient) -> None:
        """Send the call, and receive what is missing of its answer."""
        if self._is_stream:
            await self._receive_stream(client)
            return
        response = await client.post("/v1/completions", json=self._body)
        response.raise_for_status()
        for choice in response.json()["choices"]:
            self.texts[choice["index"]] = choice["text"]

    async def _receive_stream(self, client: httpx.AsyncClient) -> None:
        headers = {"last-event-id": self._last_event_id} if self._last_event_id else {}
        async with client.stream("POST", "/v1/completions", json=self._body, headers=headers) as response:
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            event_id = ""
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
                    self._last_event_id = event_id
        raise httpx.ReadError("the stream ended without its last event")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise httpx.HTTPError(str(event["error"]))
        for choice in event["choices"]:
            self.texts[choice["index"]] += choice["text"]
