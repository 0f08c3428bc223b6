"""GenerationService: checks, runs, resumes and aborts the requests of every server of a gateway.

A call with a request_id is idempotent: while its request runs, and for a while after that, a call with the same id
and content reads the same events. A resume repeats the whole call and tells what the client has of the output, so
that a gateway without the request continues it: from the tokens that a replica has of it, or by computing it again.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace

import numpy as np

from ....proto.errors import (
    DeadlineExpired,
    DuplicateRequest,
    InvalidRequest,
    QuireError,
    RequestAborted,
    RequestNotFound,
    ShuttingDown,
)
from ....proto.pooling import PoolingParams
from ....proto.sampling import RANDOM_SEED, SamplingParams
from ....proto.stream import RecalledOutput
from ...config.tenants import Tenants
from ...os_utils.event_loop import ChangeNotifier
from ...os_utils.watched_file import Source
from ...text.media.image_source import ImageSource
from ...text.requests.chat import Chat
from ...text.requests.observer import Observers, RequestObserver, RequestWatch
from ...text.requests.output_processor import OutputProcessor
from ...text.requests.outputs import OutputEvent, RequestStarted, StreamEvent
from ...text.requests.prompt_images import ImagePrompt
from ...text.requests.request import AnyPrompt, Request, TextPair
from ...text.requests.resume_position import ResumePosition
from ...text.requests.resumed_output import ResumedOutput
from ...text.requests.sequence_update import RequestStream
from ..access.tenant_limits import NO_TENANTS, Admission, TenantConcurrency, TenantLimiter
from ..routing.served_models import ServedModel, ServedModels
from .active_request import ActiveRequest, RequestLog
from .retention import RequestKey, RetainedRequests, RetentionLimits

# Longer calls are checked in a thread, so that they do not block other streams in the event loop: characters or
# tokens of the prompt, of bad_words and of allowed_token_ids.
LONG_PROMPT_CHARS = 4096

# Fields of a call that do not belong to its content.
_NOT_CONTENT = frozenset({"timeout_s", "trace_headers", "after_event", "is_resumable", "resume_position"})


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A client's call before it is checked.

    Attributes:
        model: may be empty if a single model is served.
        request_id: makes the call idempotent; if empty, the service chooses one.
        tenant: the authenticated one.
        timeout_s: time left until the caller's deadline; None without a deadline.
        cache_salt: prefix caching shares KV only between requests of the tenant with the same salt.
        add_special_tokens: add the tokenizer's special tokens to a text prompt.
        trace_headers: the caller's ``traceparent`` and ``tracestate`` (W3C Trace Context), by lower-case name.
        after_event: read on after the event with this number; None for a call that may start the request.
        is_resumable: without readers the request runs on for `RetentionLimits.resume_window_s`.
        pooling: the prompt's pooled vector is wanted; None to generate.
        resume_position: what the caller has of the output, in a call that is sent again; None in the first.
    """

    prompt: AnyPrompt
    sampling: SamplingParams
    model: str = ""
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    add_special_tokens: bool = True
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    after_event: int | None = None
    is_resumable: bool = False
    pooling: PoolingParams | None = None
    resume_position: ResumePosition | None = None

    @property
    def key(self) -> RequestKey:
        return self.tenant, self.request_id

    @property
    def is_short(self) -> bool:
        """Checking the call takes a millisecond at most."""
        sampling = self.sampling
        if (
            isinstance(self.prompt, Chat | ImagePrompt) or sampling.structured_outputs is not None
        ):  # rendered, compiled
            return False
        num_listed = len(sampling.allowed_token_ids or ()) + sum(map(len, sampling.bad_words))
        return len(self.prompt) + num_listed <= LONG_PROMPT_CHARS

    def digest(self) -> bytes:
        """Return a digest of the content; equal for repeats of a call. Raises InvalidRequest for huge token ids."""
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_CONTENT
        }
        if not isinstance(self.prompt, str | Chat | TextPair | ImagePrompt):
            try:
                values["prompt"] = np.asarray(self.prompt, dtype=np.int64).tobytes().hex()
            except OverflowError as error:
                raise InvalidRequest(
                    "prompt", "has a number of more than 64 bits, must be token ids"
                ) from error
        text = json.dumps(values, sort_keys=True, default=_plain)
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

    def check(self) -> None:
        """Raises InvalidRequest for a resumable call, or a resume, without what it needs."""
        for name, is_set in (
            ("resumable", self.is_resumable),
            ("after_sequence_number", self.after_event is not None),
        ):
            if is_set and not self.request_id:
                raise InvalidRequest(name, "needs a request_id")
        if self.after_event is not None and self.after_event < 0:
            raise InvalidRequest("after_sequence_number", f"is {self.after_event}, must be at least 0")
        if self.resume_position is not None and not self.is_resumable:
            raise InvalidRequest("received", "needs resumable")
        if self.resume_position not in (None, ResumePosition()) and self.after_event is None:
            raise InvalidRequest("received", "needs after_sequence_number")

    def seeded(self) -> SamplingParams:
        """Return the sampling parameters. A resumable call has a seed, the same one at each gateway."""
        if not self.is_resumable or self.sampling.seed not in (None, RANDOM_SEED):
            return self.sampling
        digest = hashlib.blake2b(repr(self.key).encode(errors="surrogatepass"), digest_size=8).digest()
        return replace(self.sampling, seed=int.from_bytes(digest) >> 1)


@dataclass(frozen=True, slots=True)
class Generation:
    """A running or finished request, for one reader.

    Attributes:
        numbered_events: (number, event) from the call's first event on: RequestStarted, which has the number 0, then
            the events of all completions; ends with the last completion.
    """

    model: ServedModel
    request: Request
    numbered_events: AsyncIterator[tuple[int, StreamEvent]]

    @property
    def model_name(self) -> str:
        """Return the name for responses: the adapter's, or the model's."""
        return _name_of(self.model, self.request)

    @property
    async def events(self) -> AsyncIterator[StreamEvent]:
        """The events without their numbers."""
        async for _, event in self.numbered_events:
            yield event


class GenerationService:
    """Runs requests on the models of one gateway. For one event loop.

    Args:
        observer: receives every request once, however many calls read it.
        tenants: the tenants' current limits and prefix pools; by default there are none.
        limits: bounds of what is retained for repeated and resumed calls.
    """

    def __init__(
        self,
        models: ServedModels,
        observer: RequestObserver | None = None,
        tenants: Source[Tenants] = NO_TENANTS,
        limits: RetentionLimits | None = None,
    ) -> None:
        self._models = models
        self._observer = observer or Observers()
        self._tenants = tenants
        self._limiter = TenantLimiter(tenants)
        self.limits = limits or RetentionLimits()
        self._running: dict[RequestKey, ActiveRequest] = {}
        self._num_starting = 0  # requests that are checked
        self._ends = ChangeNotifier()  # of requests
        self._end_reason = ""  # set once every request is to end
        self._finished: RetainedRequests[ActiveRequest] = RetainedRequests(self.limits)
        self.prompt_concurrency, self.constraint_concurrency = TenantConcurrency(), TenantConcurrency()
        self.image_concurrency = TenantConcurrency()

    @asynccontextmanager
    async def run(self, call: GenerationCall) -> AsyncIterator[Generation]:
        """Run a request, or read on in one that runs or has finished.

        On every exit from the block the sequences of a request that no other call reads have ended and their blocks
        are free; those of a resumable request at the latest after its window.

        Raises:
            ModelNotFound, InvalidRequest, QuotaExceeded: before the request was started.
            DuplicateRequest: the request_id belongs to another call.
            RequestNotFound: the request to resume is not kept here.
            QuireError: from the iteration of the events; the error that ended the request.
        """
        request = self._find(call) or await self._start(call)
        request.join(is_resumable=call.is_resumable)
        after = -1 if call.after_event is None else call.after_event
        del call  # its images are megabytes
        cause: BaseException | None = None
        try:
            yield Generation(request.model, request.request, request.log.read(after))
        except BaseException as error:
            cause = error
            raise
        finally:
            request.leave(cause)

    def abort(self, tenant: str, request_id: str) -> bool:
        """End a running request of the tenant. Return False if no such request is running."""
        request = self._running.get((tenant, request_id))
        if request is not None:
            request.stop(RequestAborted(f"request {request_id!r} was aborted"))
        return request is not None

    async def shut_down(self, grace_s: float) -> None:
        """Wait `grace_s` for all requests, then end with ShuttingDown those that still run and any later one.

        Each server of the gateway calls it.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._running or self._num_starting:
                    await self._ends.wait()
        self._end_reason = f"the gateway stops, and its grace period of {grace_s:g} s is over"
        requests = list(self._running.values())
        for request in requests:
            request.stop(ShuttingDown(self._end_reason))
        for request in requests:
            await request.wait_until_orphan_ended()

    def _find(self, call: GenerationCall) -> ActiveRequest | None:
        """Return the request that a repeated or resumed call reads; None for a call that starts one."""
        try:
            call.check()
            return self._repeated(call)
        except QuireError as error:
            self._observer.watch(call).on_end(error)
            raise

    def _repeated(self, call: GenerationCall) -> ActiveRequest | None:
        if not call.request_id:
            return None
        known = self._running.get(call.key) or self._finished.get(call.key)
        if call.after_event is None and (known is None or known.log.error is not None):
            return None  # a failed request is run again
        if known is None and call.resume_position is None:
            raise RequestNotFound(f"request {call.request_id!r} is not known here, or not any more")
        if known is None:
            return None
        if known.digest != call.digest():
            raise DuplicateRequest(
                f"request_id {call.request_id!r} belongs to a request of this tenant with other content"
            )
        return known if _can_serve(known.log, call) else None

    async def _start(self, call: GenerationCall) -> ActiveRequest:
        """Check the request and submit it to a replica."""
        watch = self._observer.watch(call)
        arrived_at = time.monotonic()
        self._num_starting += 1
        try:
            with ExitStack() as cleanup:
                admission = cleanup.enter_context(self._limiter.admit(call.tenant))
                model = self._models.find(call.model)
                request = await self._check(model, call)
                recalled = {} if call.resume_position is None else await model.pool.recall(request)
                known = self._repeated(call)  # it may have started while a long prompt was tokenized
                if self._end_reason:
                    raise ShuttingDown(self._end_reason)
                if known is None:
                    request = _with_time_left(request, time.monotonic() - arrived_at)
                    admission.accept(request)
                    return self._submit(call, model, request, watch, admission, cleanup, recalled)
        except BaseException as error:
            watch.on_end(error)
            raise
        finally:
            self._num_starting -= 1
            self._ends.notify()
        watch.on_end(None)
        return known

    def _submit(
        self,
        call: GenerationCall,
        model: ServedModel,
        request: Request,
        watch: RequestWatch,
        admission: Admission,
        cleanup: ExitStack,
        recalled: Mapping[int, RecalledOutput],
    ) -> ActiveRequest:
        """Submit the request to a replica; its end closes `cleanup`.

        Args:
            recalled: see MigratingRequest.
        """
        key = request.tenant, request.request_id
        stream = model.pool.submit(request, watch.on_moved, recalled)

        def on_event(event: OutputEvent) -> None:
            watch.on_event(event)
            admission.charge(event)

        log = self._open_log(call, model, request, stream, on_event)
        cleanup = cleanup.pop_all()

        def on_end(active: ActiveRequest, error: BaseException | None) -> None:
            cleanup.close()
            if self._running.get(key) is active:
                del self._running[key]
            if active.digest and log.has_ended:
                self._finished.put(key, active, log.num_bytes + request.prompt_token_ids.nbytes)
            self._ends.notify()
            watch.on_end(error)

        digest = call.digest() if call.request_id else b""
        active = ActiveRequest(model, request, stream, log, digest, self.limits.resume_window_s, on_end)
        self._running[key] = active
        self._finished.discard(key)
        watch.on_accepted(model.name, request)
        return active

    def _open_log(
        self,
        call: GenerationCall,
        model: ServedModel,
        request: Request,
        stream: RequestStream,
        on_event: Callable[[OutputEvent], None],
    ) -> RequestLog:
        """Return the log of the request, without the events that its client received from another gateway."""
        processor = OutputProcessor(request, model.tokenizer)
        max_bytes = self.limits.max_request_bytes if call.request_id else 0
        if call.resume_position is None or call.after_event is None:
            started = RequestStarted(
                request.request_id, _name_of(model, request), len(request.prompt_token_ids)
            )
            return RequestLog(started, stream, processor, max_bytes=max_bytes, on_event=on_event)
        return RequestLog(
            None,
            stream,
            ResumedOutput(processor, call.resume_position, request),
            end=call.after_event + 1,
            resume_position=call.resume_position,
            max_bytes=max_bytes,
            on_event=on_event,
        )

    async def _check(self, model: ServedModel, call: GenerationCall) -> Request:
        """Return the validated and tokenized request."""
        prompt = await self.with_fetched_images(model, call)
        check = functools.partial(
            model.checker.check,
            prompt,
            call.seeded(),
            request_id=call.request_id,
            tenant=call.tenant,
            priority=call.priority,
            timeout_s=call.timeout_s,
            cache_salt=call.cache_salt,
            prefix_pool=self._tenants().of(call.tenant).prefix_pool or "",
            add_special_tokens=call.add_special_tokens,
            pooling=call.pooling,
            lora=model.pool.adapters.find(call.model),
        )
        return check() if call.is_short else await self._concurrency_of(call).run(call.tenant, check)

    async def with_fetched_images(self, model: ServedModel, call: GenerationCall) -> AnyPrompt:
        """Return the prompt of a call, with the files of images that have to be fetched.

        Raises:
            InvalidRequest: the prompt is invalid, or an image cannot be fetched.
        """
        prompt = call.prompt
        has_images = isinstance(prompt, ImagePrompt) or (isinstance(prompt, Chat) and prompt.may_have_images)
        if not has_images or not model.checker.reads_images:
            return prompt
        find = functools.partial(model.checker.remote_images, prompt)
        if not (remote := await self.prompt_concurrency.run(call.tenant, find)):
            return prompt
        assert isinstance(prompt, Chat | ImagePrompt), "other prompts have no images"
        return prompt.with_images(await model.image_fetcher.fetch_all(remote))

    def _concurrency_of(self, call: GenerationCall) -> TenantConcurrency:
        """Return the limit of a call that takes long to check: constraints and images wait for other processes."""
        has_constraint = call.sampling.structured_outputs is not None
        has_constraint |= isinstance(call.prompt, Chat) and call.prompt.may_constrain
        if isinstance(call.prompt, ImagePrompt) or (
            isinstance(call.prompt, Chat) and call.prompt.may_have_images
        ):
            return self.image_concurrency
        return self.constraint_concurrency if has_constraint else self.prompt_concurrency


def _with_time_left(request: Request, elapsed_s: float) -> Request:
    """Return the request as it is `elapsed_s` after its call arrived.

    Under overload tokenizing a prompt may wait; a replica that did not know would compute tokens for nobody.

    Raises:
        DeadlineExpired: no time is left.
    """
    if request.timeout_s is None:
        return request
    if request.timeout_s <= elapsed_s:
        raise DeadlineExpired(
            f"request {request.request_id}: checking it took {elapsed_s:.3g} s, and its deadline was in "
            f"{request.timeout_s:.3g} s"
        )
    return replace(request, timeout_s=request.timeout_s - elapsed_s)


def _can_serve(log: RequestLog, call: GenerationCall) -> bool:
    """Return whether the log continues the events that the caller has; it may have those of another gateway."""
    if call.after_event is None:
        return log.begins_with_request
    return call.resume_position is None or log.has_sent(call.after_event, call.resume_position)


def _name_of(model: ServedModel, request: Request) -> str:
    return model.name if request.lora is None else request.lora.name


def _plain(value: object) -> object:
    """Return a value of a call as JSON can hold it."""
    if isinstance(value, ImageSource):
        return value.name
    if isinstance(
        value, bytes
    ):  # of an image: as text 10 MiB would hold up the event loop for most of a second
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else repr(value)
