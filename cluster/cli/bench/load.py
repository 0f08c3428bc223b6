"""Load: which requests are sent when, and what became of each. All times are those of the running event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ....proto.errors import QuireError
from ...simulation.traces import TracedRequest

# Ids below are special or bytes in many tokenizers.
_FIRST_TOKEN = 300


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and outputs: lognormal around their means, or all equal.

    Attributes:
        sigma: standard deviation of the logarithm; 0 for equal lengths.
    """

    num_prompt_tokens: int = 512
    num_output_tokens: int = 128
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """Return the lengths of a request."""
        return self._draw(rng, self.num_prompt_tokens), self._draw(rng, self.num_output_tokens)

    def _draw(self, rng: np.random.Generator, mean: int) -> int:
        if not self.sigma:
            return mean
        drawn = rng.lognormal(np.log(mean) - self.sigma**2 / 2, self.sigma)
        return int(np.clip(drawn, 1, 8 * mean))


@dataclass(frozen=True, slots=True)
class Turn:
    """A request to send.

    Attributes:
        due_s: when it is to be sent, from the start; of a later turn of a session the time after the answer.
        token_ids: the new tokens of its prompt.
    """

    due_s: float
    token_ids: list[int]
    num_output_tokens: int


# Turns that follow each other; the prompt of each begins with what was said before.
Session = Sequence[Turn]


@dataclass(slots=True)
class Outcome:
    """Outcome of a request. Times are in seconds from the start of the load.

    Attributes:
        due_s: when it was to be sent: its latencies count from here, so that a server that keeps the generator
            waiting does not make later requests look fast.
        sent_s: when it was sent.
        token_times: arrival of each output token; tokens of one message arrive together.
        error: kind of its failure; empty if it did not fail.
    """

    due_s: float
    sent_s: float = 0.0
    num_prompt_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def gaps(self) -> list[float]:
        """Return the time from each token to the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def mean_gap_s(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / max(1, len(self.token_times) - 1)


class Target(Protocol):
    """A server or engine that requests are sent to."""

    def stream(self, token_ids: Sequence[int], num_output_tokens: int) -> AsyncIterator[Sequence[int]]:
        """Yield new tokens as they arrive, until the output has `num_output_tokens`.

        Raises:
            QuireError: the request failed.
        """
        ...


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> list[int]:
    """Return random token ids, none of them special."""
    ids: list[int] = rng.integers(min(_FIRST_TOKEN, vocab_size // 2), vocab_size, length).tolist()
    return ids


def draw_sessions(
    rng: np.random.Generator,
    lengths: Lengths,
    vocab_size: int,
    *,
    rate: float | None,
    burstiness: float = 1.0,
    num_turns: int = 1,
    think_s: float = 0.0,
    shared_tokens: int = 0,
) -> Iterator[list[Turn]]:
    """Yield sessions without end.

    Args:
        rate: sessions per second; None if they are due at once.
        burstiness: coefficient of variation of the gaps, which have a gamma distribution: 1 for a Poisson process.
        num_turns: requests of a session.
        think_s: time from a reply to the next turn.
        shared_tokens: the number of tokens with which all sessions begin.
    """
    now, shared = 0.0, random_prompt(rng, shared_tokens, vocab_size)
    while True:
        if rate is not None:
            shape = 1 / burstiness**2
            now += rng.gamma(shape, 1 / (rate * shape))
        turns = []
        for number in range(num_turns):
            num_prompt, num_output = lengths.draw(rng)
            new = random_prompt(rng, num_prompt, vocab_size)
            turns.append(Turn(think_s if number else now, new if number else shared + new, num_output))
        yield turns


def sessions_of_trace(requests: Iterable[TracedRequest], vocab_size: int) -> Iterator[list[Turn]]:
    """Yield the requests of a trace, each a session; equal blocks have equal tokens."""
    low = min(_FIRST_TOKEN, vocab_size // 2)
    for request in requests:
        token_ids = (low + request.prompt() % (vocab_size - low)).tolist()
        yield [Turn(request.arrival_s, token_ids, request.num_output_tokens)]


class LoadGenerator:
    """Sends sessions to a target and records what becomes of their requests.

    Args:
        on_end: called with each outcome.
        max_prompt_tokens: a session ends before a turn with a longer prompt.
    """

    def __init__(
        self,
        target: Target,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
        max_prompt_tokens: int = 1 << 30,
    ) -> None:
        self._target, self._on_end, self._max_prompt_tokens = target, on_end, max_prompt_tokens
        self._start_s = 0.0
        self._outcomes: list[Outcome] = []

    async def open_loop(self, sessions: Iterable[Session]) -> list[Outcome]:
        """Send each session when it is due, however many others run. Returns the outcomes by due time."""
        self._begin()
        tasks: set[asyncio.Task[None]] = set()
        for session in sessions:
            await self._sleep_until(session[0].due_s)
            task = asyncio.create_task(self._run(session, session[0].due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.gather(*tasks)
        return self._sorted()

    async def closed_loop(self, sessions: Iterable[Session], concurrency: int) -> list[Outcome]:
        """Keep `concurrency` sessions running. Returns the outcomes by due time."""
        self._begin()
        left = iter(sessions)

        async def work() -> None:
            for session in left:
                await self._run(session, self._now())

        await asyncio.gather(*(work() for _ in range(concurrency)))
        return self._sorted()

    def _begin(self) -> None:
        self._start_s, self._outcomes = asyncio.get_running_loop().time(), []

    def _sorted(self) -> list[Outcome]:
        return sorted(self._outcomes, key=lambda outcome: outcome.due_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    async def _sleep_until(self, due_s: float) -> None:
        delay_s = due_s - self._now()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _run(self, session: Session, due_s: float) -> None:
        said: list[int] = []
        for number, turn in enumerate(session):
            if number:
                due_s = self._now() + turn.due_s
                await self._sleep_until(due_s)
            said += turn.token_ids
            if len(said) > self._max_prompt_tokens:
                return
            outcome = Outcome(due_s, self._now(), len(said))
            said = said + await self._send(outcome, said, turn.num_output_tokens)
            self._outcomes.append(outcome)
            self._on_end(outcome)
            if outcome.error:
                return

    async def _send(self, outcome: Outcome, prompt: list[int], num_output_tokens: int) -> list[int]:
        """Send a request, record its times in `outcome`, and return the tokens of its output."""
        received: list[int] = []
        try:
            stream = self._target.stream(prompt, num_output_tokens)
            async with aclosing(stream) as tokens:  # type: ignore[type-var]
                async for new in tokens:
                    outcome.token_times += [self._now()] * len(new)
                    received += new
            if not received:
                outcome.error = "no output"
        except QuireError as error:
            outcome.error = type(error).__name__
        outcome.ended_s = self._now()
        return received
