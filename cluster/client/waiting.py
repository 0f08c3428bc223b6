"""Two ways to wait for a call, blocking and asynchronous, and the decorators that give a method both.

The blocking way is not a facade over the asynchronous one on a background thread. In a process forked from one that
had used grpc.aio so, a new client hung or crashed in 7 of 7 runs (grpc 1.85), and with blocking channels in 0 of 4.
The facade also took 1.2 to 2.0 times the processor time per event of a single stream.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast, overload

import grpc
import grpc.aio

from ...proto.errors import QuireError
from ..os_utils.closing import Closing
from .call import Call

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Blocking(Closing):
    """Calls that block the thread until their response is there."""

    _grpc: ClassVar[Any] = grpc
    _channels: list[Any]

    def close(self) -> None:
        """Close the connection. Running calls are canceled."""
        for channel in self._channels:
            channel.close()

    def _wait(self, build: Callable[[], Call[T]]) -> T:
        call = build()
        with self._abort_if_left(call):
            while True:
                try:
                    return call.read(call.start())
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                time.sleep(delay_s)

    def _iterate(self, call: Call[T], messages: Any) -> Generator[T, None, None]:
        with self._abort_if_left(call):
            while True:
                try:
                    for message in messages:
                        yield call.read(message)
                    return
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                finally:
                    messages.cancel()
                time.sleep(delay_s)
                messages = call.start()

    @contextmanager
    def _abort_if_left(self, call: Call[Any]) -> Iterator[None]:
        """End the request if the block is left by anything else than its end or its failure."""
        try:
            yield
        except QuireError:
            raise
        except BaseException:
            if call.abort is not None:
                with suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed
                    call.abort.start()
            raise


class Asynchronous:
    """Calls that an event loop waits for."""

    _grpc: ClassVar[Any] = grpc.aio
    _channels: list[Any]

    async def close(self) -> None:
        """Close the connection. Running calls are canceled."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _wait(self, build: Callable[[], Call[T]]) -> T:
        call = build()
        async with self._abort_if_left(call):
            while True:
                try:
                    return call.read(await call.start())
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                await asyncio.sleep(delay_s)

    async def _iterate(self, call: Call[T], messages: Any) -> AsyncGenerator[T, None]:
        async with self._abort_if_left(call):
            while True:
                try:
                    async for message in messages:
                        yield call.read(message)
                    return
                except grpc.RpcError as error:
                    delay_s = call.delay_after(error)
                finally:
                    messages.cancel()
                await asyncio.sleep(delay_s)
                messages = call.start()

    @asynccontextmanager
    async def _abort_if_left(self, call: Call[Any]) -> AsyncIterator[None]:
        try:
            yield
        except QuireError:
            raise
        except BaseException:
            if call.abort is not None:
                with suppress(grpc.RpcError, grpc.aio.UsageError):  # UsageError: the channel is closed
                    await call.abort.start()
            raise


class Unary(Protocol[P, T_co]):
    """Type of a method for type checkers: it returns its response, or a coroutine of it."""

    @overload
    def __get__(self, client: None, owner: type, /) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Blocking, owner: type, /) -> Callable[P, T_co]: ...
    @overload
    def __get__(self, client: Asynchronous, owner: type, /) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


class Stream(Protocol[P, T_co]):
    """Type of a method for type checkers: it returns a generator of messages, or an asynchronous one."""

    @overload
    def __get__(self, client: None, owner: type, /) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Blocking, owner: type, /) -> Callable[P, Generator[T_co, None, None]]: ...
    @overload
    def __get__(self, client: Asynchronous, owner: type, /) -> Callable[P, AsyncGenerator[T_co, None]]: ...


def unary(build: Callable[Concatenate[Any, P], Call[T]]) -> Unary[P, T]:
    """Return the method of both kinds of clients that waits for the response to the call that `build` returns."""

    @functools.wraps(build)
    def method(client: Any, *args: P.args, **options: P.kwargs) -> Any:
        return client._wait(functools.partial(build, client, *args, **options))

    return cast(Unary[P, T], method)


def stream(build: Callable[Concatenate[Any, P], Call[T]]) -> Stream[P, T]:
    """Return the method of both kinds of clients that yields the messages of the call that `build` returns."""

    @functools.wraps(build)
    def method(client: Any, *args: P.args, **options: P.kwargs) -> Any:
        call = build(client, *args, **options)
        return client._iterate(call, call.start())

    return cast(Stream[P, T], method)
