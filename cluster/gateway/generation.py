"""GenerationService: checks, runs and aborts requests for every server of a gateway, whatever their protocol."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from ...proto.errors import DuplicateRequest, Overloaded, RequestAborted
from ...proto.sampling import SamplingParams
from ..config.tenants import Tenants
from ..host.watched_file import Source
from ..requests.chat import Chat
from ..requests.observer import Observers, RequestObserver, RequestWatch
from ..requests.output_processor import OutputProcessor
from ..requests.outputs import RequestStarted, StreamEvent
from ..requests.request import Prompt, Request
from ..requests.request_stream import output_events
from .request_migration import MigratingRequest
from .served_models import ServedModel, ServedModels
from .tenant_limits import NO_TENANTS, Admission, TenantLimiter

# Longer prompts are tokenized in a thread, so that they do not block other streams in the event loop.
LONG_PROMPT_CHARS = 4096

RequestKey = tuple[str, str]  # (tenant, request_id): no tenant can abort or block another tenant's request


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A client's call before it is checked.

    Attributes:
        model: may be empty if a single model is served.
        request_id: if empty, the service chooses one.
        tenant: the authenticated one.
        timeout_s: time left until the caller's deadline; None without a deadline.
        cache_salt: prefix caching shares KV only between requests of the tenant with the same salt.
        add_special_tokens: add the tokenizer's special tokens to a text prompt.
        trace_headers: the caller's ``traceparent`` and ``tracestate`` (W3C Trace Context), by lower-case name.
    """

    prompt: Prompt
    sampling: SamplingParams
    model: str = ""
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    add_special_tokens: bool = True
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """A running request.

    Attributes:
        events: RequestStarted, then the events of all completions; ends with the last completion.
    """

    model: ServedModel
    request: Request
    events: AsyncIterator[StreamEvent]


class GenerationService:
    """Runs requests on the models of one gateway. For one event loop.

    Args:
        observer: receives every call.
        tenants: the tenants' current limits and prefix pools; by default there are none.
    """

    def __init__(
        self,
        models: ServedModels,
        observer: RequestObserver | None = None,
        tenants: Source[Tenants] = NO_TENANTS,
    ) -> None:
        self._models = models
        self._observer = observer or Observers()
        self._tenants = tenants
        self._limiter = TenantLimiter(tenants)
        self._running: dict[RequestKey, MigratingRequest] = {}

    @asynccontextmanager
    async def run(self, call: GenerationCall) -> AsyncIterator[Generation]:
        """Run a request. On every exit from the block its sequences have ended and their blocks are free.

        Raises:
            ModelNotFound, InvalidRequest, DuplicateRequest, QuotaExceeded: before the request was started.
            QuireError: from the iteration of the events; the error that ended the request.
        """
        with self._watch(call) as watch, self._limiter.admit(call.tenant) as admission:
            model = self._models.find(call.model)
            self._check_not_running((call.tenant, call.request_id))
            request = await self._check(model, call)
            admission.accept(request)
            key = request.tenant, request.request_id
            self._check_not_running(key)  # a duplicate may have started while a long prompt was tokenized
            running = self._running[key] = model.pool.submit(request, watch.on_moved)
            watch.on_accepted(model.name, request)
            try:
                yield Generation(model, request, _events(model, request, running, watch, admission))
            finally:
                running.abort()
                del self._running[key]

    def abort(self, tenant: str, request_id: str) -> bool:
        """End a running request of the tenant. Return False if no such request is running."""
        running = self._running.get((tenant, request_id))
        if running is not None:
            running.end(RequestAborted(f"request {request_id!r} was aborted"))
        return running is not None

    @contextmanager
    def _watch(self, call: GenerationCall) -> Iterator[RequestWatch]:
        """Report the end of the call to its watch, however it ends."""
        watch = self._observer.watch(call)
        try:
            yield watch
        except BaseException as error:
            watch.on_end(error)
            raise
        else:
            watch.on_end(None)

    async def _check(self, model: ServedModel, call: GenerationCall) -> Request:
        """Return the validated and tokenized request."""
        check = functools.partial(
            model.checker.check,
            call.prompt,
            call.sampling,
            request_id=call.request_id,
            tenant=call.tenant,
            priority=call.priority,
            timeout_s=call.timeout_s,
            cache_salt=call.cache_salt,
            prefix_pool=self._tenants().of(call.tenant).prefix_pool or "",
            add_special_tokens=call.add_special_tokens,
        )
        is_short = not isinstance(call.prompt, Chat) and len(call.prompt) <= LONG_PROMPT_CHARS
        return check() if is_short else await asyncio.to_thread(check)

    def _check_not_running(self, key: RequestKey) -> None:
        if key in self._running:
            raise DuplicateRequest(f"request {key[1]!r} is running already")


async def _events(
    model: ServedModel,
    request: Request,
    running: MigratingRequest,
    watch: RequestWatch,
    admission: Admission,
) -> AsyncIterator[StreamEvent]:
    yield RequestStarted(request.request_id, model.name, len(request.prompt_token_ids))
    try:
        async for event in output_events(running, OutputProcessor(request, model.tokenizer)):
            watch.on_event(event)
            admission.charge(event)
            yield event
    except Overloaded as error:
        if error.retry_after_s is None:  # the scheduler does not know its speed
            error.retry_after_s = model.pool.queue_delay_s
        raise
