"""`quire serve`: a local cluster, a replica on it and a gateway before it, until a signal or a failure."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..proto.config import EngineConfig
from ..proto.errors import ConfigError, QuireError, ReplicaUnavailable
from .gateway import Gateway
from .replica import LocalCluster, Replica, num_actors, start_replica
from .replica_client import ReplicaClient
from .resolve import resolve
from .security import ListenAddress, Security
from .stopwatch import Stopwatch
from .tokenizer import Tokenizer

CANARY_TIMEOUT_S = 60.0
# For running streams to end after a signal, and to be told after a failure.
GRACE_S = 5.0
FAILURE_GRACE_S = 1.0
# A mistake in the options shows within this time; everything else is looked into while Ray starts.
_HASTE_S = 0.2
# Beyond a step's own deadline, before a silent scheduler is given up.
_PATIENCE_S = 5.0
_SIGNALS = signal.SIGINT, signal.SIGTERM

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What an operator may choose; the first part goes to `resolve`, which says what each means.

    Attributes:
        listen: ``HOST:PORT`` of the gateway; port 0: the system chooses.
        insecure: allow an address that others can reach without TLS and tokens.
        tls_cert, tls_key: PEM files.
        token_file: bearer tokens that clients must have one of, one a line, as ``TOKEN`` or ``TENANT:TOKEN``.
    """

    model: str
    served_model_name: str | None = None
    tensor_parallel_size: int = 1
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    num_host_kv_blocks: int = 0
    prefix_caching: bool = True
    batch_invariant: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_queue_len: int = 4096
    policy: str = "fcfs"
    tenant_weights: tuple[tuple[str, float], ...] = ()
    step_timeout_s: float = 60.0
    audit: bool = False
    seed: int = 0
    listen: str = "127.0.0.1:50051"
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    def resolve(self) -> EngineConfig:
        """Raises ConfigError where the model or this machine does not allow it."""
        return resolve(
            self.model,
            served_model_name=self.served_model_name,
            tensor_parallel_size=self.tensor_parallel_size,
            device=self.device,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_memory=self.kv_cache_memory,
            num_kv_blocks=self.num_kv_blocks,
            num_host_kv_blocks=self.num_host_kv_blocks,
            prefix_caching=self.prefix_caching,
            batch_invariant=self.batch_invariant,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_len=self.max_queue_len,
            policy=self.policy,
            tenant_weights=self.tenant_weights,
            step_timeout_s=self.step_timeout_s,
            audit=self.audit,
            seed=self.seed,
        )

    def security(self) -> Security:
        """Raises ConfigError on a file that cannot be used."""
        return Security.load(tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file)


def serve(options: ServeOptions) -> int:
    """Serves until SIGINT or SIGTERM. Prints one line on stdout once a token has come through all ranks.

    For the main thread, which signals reach.

    Returns:
        The exit status: 0, or 128 and the signal's number when one came before the server was ready.

    Raises:
        ConfigError: this cannot be started as it is asked for.
        ReplicaUnavailable: it did not start, or a process of it failed; names the rank. Clients have been told.
    """
    _log_to_stderr()
    stopwatch = Stopwatch()
    security = options.security()
    _check_listen(ListenAddress.parse(options.listen), security, options.insecure)
    try:
        with ExitStack() as stack:
            stack.callback(_restore_handlers, {number: signal.getsignal(number) for number in _SIGNALS})
            _raise_on_signals()
            preparation = stack.enter_context(ThreadPoolExecutor(1, "prepare")).submit(_prepare, options)
            with suppress(TimeoutError):
                preparation.result(_HASTE_S)
            cluster = stack.enter_context(LocalCluster(num_actors(options.tensor_parallel_size)))
            _raise_on_signals()  # Ray has put its own handler in the place of ours
            stopwatch.lap("ray")
            config, tokenizer = preparation.result()
            stopwatch.lap("prepare")
            replica = stack.enter_context(start_replica(config, cluster))
            stopwatch.lap("replica")
            front = _Front(options, security, replica, tokenizer)
            stack.callback(_ignore_signals)
            return asyncio.run(front.run(stopwatch))
    except SystemExit:  # while it starts, Ray has its own handler of SIGTERM
        return 128 + signal.SIGTERM
    except _Interrupted as interrupted:
        return 128 + interrupted.signal_number


def _prepare(options: ServeOptions) -> tuple[EngineConfig, Tokenizer]:
    """What takes seconds beside Ray's start: reading both imports transformers."""
    config = options.resolve()
    return config, Tokenizer(config.model.path)


class _Front:
    """The gateway before one replica, in its event loop."""

    def __init__(
        self, options: ServeOptions, security: Security, replica: Replica, tokenizer: Tokenizer
    ) -> None:
        self._replica = replica
        patience_s = replica.config.scheduler.step_timeout_s + _PATIENCE_S
        self._client = ReplicaClient(replica.address, replica.replica_id, patience_s=patience_s)
        self._gateway = Gateway(
            replica.config,
            tokenizer,
            self._client,
            options.listen,
            security=security,
            insecure=options.insecure,
        )

    async def run(self, stopwatch: Stopwatch) -> int:
        """Serves until a signal (then returns the exit status) or the replica's failure (then raises it)."""
        failure = asyncio.wrap_future(self._replica.failure)
        signalled = _next_signal()
        self._client.start()
        try:
            address = await self._gateway.start()
            stopwatch.lap("gateway")
            ready = asyncio.ensure_future(self._gateway.wait_ready())
            await asyncio.wait(
                (ready, failure, signalled), timeout=CANARY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            stopwatch.lap("canary")
            is_ready = ready.done()
            ready.cancel()
            if is_ready:
                _log.info("ready after %.2f s: %s", stopwatch.total_s, stopwatch)
                print(f"quire is ready on {address}", flush=True)
                await asyncio.wait((failure, signalled), return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                await self._give_up(failure.result())
            if not signalled.done():
                raise ReplicaUnavailable(f"no canary token came through all ranks in {CANARY_TIMEOUT_S:g} s")
            _log.info("stopping; running requests have %g s", GRACE_S)
            await self._gateway.stop(GRACE_S)
            return 0 if is_ready else 128 + signalled.result()
        finally:
            failure.cancel()
            await self._gateway.stop(0)
            await self._client.close()

    async def _give_up(self, error: QuireError | None) -> NoReturn:
        """The replica has ended: tells the clients, then raises why."""
        error = error or ReplicaUnavailable(f"{self._replica.replica_id} ended")
        self._client.fail(str(error))
        await self._gateway.stop(FAILURE_GRACE_S)
        raise error


class _Interrupted(BaseException):
    """A signal came during start-up."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def _log_to_stderr() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("quire").setLevel(logging.INFO)


def _raise_on_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def _restore_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # A second one must not interrupt the shutdown that the first one begins.
    _ignore_signals()
    raise _Interrupted(number)


def _next_signal() -> asyncio.Future[int]:
    """The number of the next signal, once it has come. For the main thread's running event loop."""
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[int] = loop.create_future()

    def note(number: int) -> None:
        if not arrival.done():
            arrival.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, note, number)
    return arrival


def _check_listen(address: ListenAddress, security: Security, insecure: bool) -> None:
    """Refuses an address before anything is started; the gateway itself checks again."""
    security.check_listen(address, insecure=insecure)
    try:
        socket.create_server((address.host, address.port), family=_family(address)).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error


def _family(address: ListenAddress) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
