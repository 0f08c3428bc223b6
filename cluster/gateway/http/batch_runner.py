"""BatchRunner: sends the requests of batches through the server's own application, a few at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from ....proto.errors import ConfigError
from ...client.wire.batch_files import BatchRequest, OutputFile, check_batch, read_batch
from ...client.wire.tokens import Role
from ..access.authentication import Caller
from .batch_store import BatchStore, Item, has_ended
from .errors import UNEXPECTED

# Requests of all batches that run at once: enough to fill steps beside the requests of clients.
MAX_RUNNING = 32
# Batches that run at once, each of which holds its requests in memory.
MAX_BATCHES = 4
# Time in which a batch must end.
WINDOW_S = 86_400
# In vLLM's sense, lower runs first: requests of clients have 0.
PRIORITY = 1
_RETRIABLE = frozenset({429, 502, 503, 504})
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 10.0
_EXPIRED = {"error": {"code": "batch_expired", "message": "the batch's completion_window has passed"}}

_log = logging.getLogger(__name__)


@dataclass
class _Running:
    """A batch that runs.

    Attributes:
        outputs: outputs of the requests that succeeded, and of the requests that failed.
    """

    task: asyncio.Task[None]
    is_cancelled: bool = False
    num_requests: int = 0
    outputs: list[OutputFile] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        completed, failed = [len(output.done) for output in self.outputs] or (0, 0)
        return {"total": self.num_requests, "completed": completed, "failed": failed}


class BatchRunner:
    """Runs the batches of a store. For one event loop.

    A batch that a stop of the server interrupts goes on at the next start: its outputs have the requests that ended.

    Args:
        app: the application of the server.
    """

    def __init__(self, store: BatchStore, app: ASGIApp) -> None:
        self.store = store
        self._app = app
        self._running: dict[str, _Running] = {}
        self._batches = asyncio.Semaphore(MAX_BATCHES)
        self._requests = asyncio.Semaphore(MAX_RUNNING)

    def start(self) -> None:
        """Continue the batches that an earlier run of the server left."""
        for tenant, batch in self.store.unfinished():
            self.run(tenant, batch)

    async def stop(self) -> None:
        """Interrupt all batches. Safe to call twice."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    def run(self, tenant: str, batch: Item) -> None:
        """Start a batch."""
        running = _Running(asyncio.create_task(self._run(tenant, batch)))
        running.is_cancelled = batch["status"] == "cancelling"
        self._running[batch["id"]] = running
        running.task.add_done_callback(lambda _: self._running.pop(batch["id"], None))

    def current(self, batch: Item) -> Item:
        """Return a batch with the numbers of its requests as they are now."""
        running = self._running.get(batch["id"])
        return batch if running is None or has_ended(batch) else batch | {"request_counts": running.counts}

    def cancel(self, tenant: str, batch: Item) -> Item:
        """End a batch; its requests that run are aborted."""
        if has_ended(batch):
            return batch
        batch = batch | {"status": "cancelling", "cancelling_at": int(time.time())}
        self.store.put(tenant, batch)
        if (running := self._running.get(batch["id"])) is not None:
            running.is_cancelled = True
            running.task.cancel()
        return batch

    async def _run(self, tenant: str, batch: Item) -> None:
        await asyncio.sleep(0)  # until it is registered
        running = self._running[batch["id"]]
        try:
            async with self._batches:
                status = await self._run_requests(tenant, batch, running)
        except asyncio.CancelledError:
            if not running.is_cancelled:
                raise  # the server stops
            status = "cancelled"
        except ConfigError as error:
            path = self.store.content_path(tenant, batch["input_file_id"])
            batch["errors"] = _errors(str(error).replace(f"{path} ", ""))
            status = "failed"
        except Exception:
            _log.exception("batch %s failed unexpectedly", batch["id"])
            batch["errors"] = _errors(UNEXPECTED)
            status = "failed"
        finally:
            for output in running.outputs:
                output.close()
        self._finish(tenant, batch, running, status)

    async def _run_requests(self, tenant: str, batch: Item, running: _Running) -> str:
        """Run the requests that have no line yet; return the status at the end."""
        if running.is_cancelled:
            return "cancelled"
        path = self.store.content_path(tenant, batch["input_file_id"])
        running.num_requests = await asyncio.to_thread(check_batch, path)
        if batch["status"] == "validating":
            batch |= {"status": "in_progress", "in_progress_at": int(time.time())}
            batch |= {name: self.store.new_id("file") for name in ("output_file_id", "error_file_id")}
            self.store.put(tenant, batch)
        for name in ("output_file_id", "error_file_id"):
            running.outputs.append(OutputFile(self.store.content_path(tenant, batch[name])))
        done = set().union(*(output.done for output in running.outputs))
        requests = await asyncio.to_thread(lambda: list(read_batch(path, done)))
        wrong = next((each.url for each in requests if each.url != batch["endpoint"]), None)
        if wrong is not None:
            raise ConfigError(f"url is {wrong!r}, must be the batch's endpoint, {batch['endpoint']!r}")
        caller = Caller(tenant or None, frozenset({Role.USER}))
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await self._requests.acquire()
                task = group.create_task(self._answer(request, caller, batch["expires_at"], running))
                task.add_done_callback(lambda _: self._requests.release())
        return "expired" if time.time() >= batch["expires_at"] else "completed"

    async def _answer(
        self, request: BatchRequest, caller: Caller, expires_at: float, running: _Running
    ) -> None:
        content = json.dumps({"priority": PRIORITY} | request.body).encode()
        delay_s = _FIRST_DELAY_S
        status, body = 408, _EXPIRED
        while (left_s := expires_at - time.time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    status, body = await call(self._app, caller, request.url, content)
            except TimeoutError:
                status, body = 408, _EXPIRED
            if status not in _RETRIABLE:
                break
            status, body = 408, _EXPIRED
            await asyncio.sleep(min(delay_s, left_s))
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
        output = running.outputs[status >= 400]
        await asyncio.to_thread(output.append, request.custom_id, status, body)

    def _finish(self, tenant: str, batch: Item, running: _Running, status: str) -> None:
        batch["request_counts"] = running.counts
        if status == "cancelled":
            batch["cancelling_at"] = int(time.time())
        for name in ("output_file_id", "error_file_id"):
            if (file_id := batch.get(name)) is None:
                continue
            path = self.store.content_path(tenant, file_id)
            if path.exists() and path.stat().st_size:
                self.store.publish(tenant, file_id, f"{batch['id']}_{name[:-8]}.jsonl", "batch_output")
            else:
                path.unlink(missing_ok=True)
                batch[name] = None
        batch |= {"status": status, f"{status}_at": int(time.time())}
        self.store.put(tenant, batch)


def _errors(problems: str) -> Item:
    """Return the member `errors` of a batch that failed: a line per problem."""
    data = [
        {"code": "invalid_request", "message": problem, "line": None, "param": None}
        for problem in problems.split("\n")
    ]
    return {"object": "list", "data": data}


async def call(app: ASGIApp, caller: Caller, path: str, content: bytes) -> tuple[int, Any]:
    """Return status and JSON of the application's response to a POST of this caller."""
    unread = [content]
    status, parts = 500, []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": None, "server": None, "state": {"caller": caller},
    }  # fmt: skip
    await app(scope, receive, send)
    return status, json.loads(b"".join(parts))
