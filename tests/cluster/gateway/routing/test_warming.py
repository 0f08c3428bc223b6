"""A replica that becomes ready reads what prompts share from the others, within bounds, beside its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fake_fleet import FakeLauncher, FakeReplica
from fakes import oracle

from quire.cluster.config.deployment import Deployment
from quire.cluster.fleet.routing.hot_prefixes import HotPrefix, HotPrefixes
from quire.cluster.fleet.routing.router import Router
from quire.cluster.gateway.routing import warming
from quire.cluster.gateway.routing.replica_pool import ReplicaPool
from quire.cluster.gateway.routing.warming import LEND_TIMEOUT_S, warm
from quire.cluster.text.requests.request import Request
from quire.proto.kv_transfer import KvOffer
from quire.proto.replica_status import ReplicaStatus
from quire.proto.sampling import SamplingParams

DEADLINE_S = 60.0
SIZE = 16


def prefix(num_blocks: int) -> HotPrefix:
    prefixes = HotPrefixes(SIZE)
    request = Request("r", np.arange(num_blocks * SIZE + 1, dtype=np.int32), SamplingParams())
    hashes = [bytes([number]) * 8 for number in range(num_blocks)]
    for _ in range(2):
        prefixes.note(request, hashes, num_blocks, 0.0)
    return prefixes.hottest(0.0)[0]


class Side:
    """A replica that lends and one that reads.

    Attributes:
        fetched: (blocks, whether the prompt was sent) of each fetch.
        pieces: tokens that were ordered.
    """

    problem = ""

    def __init__(self, num_blocks: int = 1000, pull_blocks_per_s: float = 1e9, lent: int = 1 << 30) -> None:
        self.latest_status = ReplicaStatus(
            "b", "m", query_id=0, num_blocks=num_blocks, kv_layout=b"l", kv_token_bytes=1.0,
            kv_pull_bytes_per_s=pull_blocks_per_s * SIZE,
        )  # fmt: skip
        self.lent, self.asked = lent, list[int]()
        self.fetched, self.pieces = list[tuple[int, bool]](), list[int]()

    async def lend(self, request: Request, timeout_s: float) -> KvOffer | None:
        assert timeout_s == LEND_TIMEOUT_S
        self.asked.append(len(request.prompt_token_ids) // SIZE)
        num_blocks = min(self.lent, self.asked[-1])
        ids = np.arange(1, num_blocks + 1, dtype=np.int32)
        return KvOffer(1, b"l", ("a",), b"d", num_blocks, ids, 10.0) if num_blocks else None

    def fetch(self, request: Request, handle: int | None = None) -> int:
        assert request.fetch_only
        assert request.kv is not None
        self.fetched.append((request.kv.num_blocks, handle is None))
        return 7

    def warm(
        self,
        prefixes: Sequence[HotPrefix],
        num_cached: int = 0,
        clock: Any = lambda: 0.0,
        has_lender: bool = True,
    ) -> None:
        async def run() -> None:
            lender = self if has_lender else None
            async for num_tokens in warm(self, prefixes, SIZE, lambda _: num_cached, lambda _: lender, clock):
                self.pieces.append(num_tokens)

        asyncio.run(run())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses, which take no time."""
    pauses, sleep = list[float](), asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(warming, "PIECE_S", 0.25)
    monkeypatch.setattr(asyncio, "sleep", pause)
    return pauses


def test_prefixes_are_read_in_pieces_with_pauses_as_long_as_the_reads(no_pauses: list[float]) -> None:
    side = Side(pull_blocks_per_s=16.0)
    side.warm([prefix(10)], num_cached=1)
    assert side.fetched == [(5, True), (9, False), (10, False)]
    assert side.pieces == [4 * SIZE, 4 * SIZE, SIZE]
    assert [pause for pause in no_pauses if pause][:2] == [2 * (0.02 + 0.25)] * 2


def test_memory_that_is_used_and_time_that_is_over_end_it() -> None:
    side = Side(num_blocks=20)
    side.warm([prefix(8), prefix(4)])
    assert side.fetched == [(8, True)], "more than half of the blocks are filled"
    seconds = iter((0.0, 0.0, 31.0))
    late = Side(pull_blocks_per_s=4.0)
    late.warm([prefix(8)], clock=lambda: next(seconds))
    assert late.fetched == [(1, True)]


def test_replica_that_cannot_read_or_lend_is_left_alone() -> None:
    for side in (Side(), Side(lent=0)):
        side.warm([prefix(2)], has_lender=side.lent == 0)
        assert not side.fetched
    shorter = Side(lent=3)
    shorter.warm([prefix(4)])
    assert shorter.fetched == [(3, True)]
    assert shorter.asked == [4, 4], "what was evicted is asked for again and again"
    has_all = Side()
    has_all.warm([prefix(4)], num_cached=4)
    assert not has_all.asked
    failed = Side()
    failed.problem = "killed"
    failed.warm([prefix(4)])
    assert not failed.asked


@pytest.fixture
def launcher() -> Iterator[FakeLauncher]:
    launcher = FakeLauncher()
    yield launcher
    launcher.close()


class Pool:
    """A pool of replicas whose KV travels."""

    def __init__(self, launcher: FakeLauncher) -> None:
        self._launcher = launcher
        self.pool = ReplicaPool("fake", SIZE)
        self.replicas: dict[str, FakeReplica] = {}

    async def add(self, name: str) -> None:
        deployment = Deployment.from_table({"model": "demo", "kv_transfer": True})
        self.replicas[name] = self._launcher.launch(deployment, name, lambda progress: None)
        client = self._launcher.connect(self.replicas[name].record)
        client.start()
        self.pool.add(client)
        await self.until(lambda: self.pool.why_unavailable(name) == "")
        assert (await client.status(DEADLINE_S)).kv_layout, "its first step has told the layout"

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    def moves(self, name: str) -> Any:
        return self.replicas[name]._loop._scheduler.kv_moves

    async def ask(self, prompt: list[int], num_tokens: int = 4) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=1)
        tokens = list[int]()
        async for _, update in self.pool.submit(Request("r", np.array(prompt, np.int32), params)):
            tokens += update.token_ids
            assert update.finish is None or not update.finish.error_reason, update.finish
        assert tokens == oracle(prompt, num_tokens, stops=())


def run_pool(launcher: FakeLauncher, scenario: Callable[[Pool], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        pool = Pool(launcher)
        try:
            await scenario(pool)
        finally:
            await pool.pool.close()

    asyncio.run(main())


SYSTEM = [5 + number % 40 for number in range(4 * SIZE)]


def test_new_replica_reads_what_prompts_share_before_it_is_asked(
    launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the pauses of real loops take time

    async def scenario(pool: Pool) -> None:
        await pool.add("a")
        for number in range(3):
            await pool.ask([*SYSTEM, *range(6, 10 + number)])
        await pool.add("b")
        await pool.until(lambda: pool.moves("b").num_kv_ahead_tokens == 4 * SIZE)
        assert pool.pool.num_warmed_tokens == 4 * SIZE

    run_pool(launcher, scenario)


def test_replica_reads_the_prefix_of_another_one_that_has_a_longer_queue(
    launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    chosen = "a"
    monkeypatch.setattr(Router, "choose", lambda router, hashes, salt: chosen)

    async def scenario(pool: Pool) -> None:
        nonlocal chosen
        for chosen in ("a", "b"):
            await pool.add(chosen)
            pool.replicas[chosen].group.step_s = 0.05
            await pool.ask([7 + (3 * place) % 50 for place in range(200)])  # which measures its rate
            status = await pool.pool.clients[chosen].status(DEADLINE_S)
            assert status.prefill_tokens_per_s > 0.0
        chosen, prefix = "a", [*SYSTEM, *SYSTEM, *SYSTEM]
        await pool.ask([*prefix, 6, 7])
        chosen = "b"
        await pool.ask([*prefix, *range(8, 40)])
        assert pool.moves("b").num_kv_pulled_tokens == len(prefix)
        await pool.ask([*prefix, *range(9, 40)])
        assert pool.moves("b").num_kv_pulled_tokens == len(prefix), "what is cached is read again"

    run_pool(launcher, scenario)
