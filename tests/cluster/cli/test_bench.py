"""`quire bench`: servers with known delays are measured exactly, in simulated time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from local_server import ThreadedServer, threaded_server
from typer.testing import CliRunner

from quire.cluster.cli import app
from quire.cluster.cli.bench.load import Lengths, LoadGenerator, Outcome, Turn, draw_sessions
from quire.cluster.cli.bench.measures import Measures, is_saturated, summarize
from quire.cluster.cli.bench.report import latency_table, write_page
from quire.cluster.cli.bench.targets import AiperfLoad, read_aiperf
from quire.cluster.simulation.replica import SimulatedClock
from quire.cluster.simulation.run import Targets
from quire.proto.errors import ConfigError, Overloaded
from tests.simulation.event_loop import SimulatedEventLoop

T = TypeVar("T")
TTFT_S, ITL_S = 0.25, 0.02


def simulated(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = SimulatedEventLoop(SimulatedClock())
    try:
        return loop.run_until_complete(make())
    finally:
        loop.close()


class Server:
    """A target with known delays.

    Args:
        stall: (begin, end) in which nothing is answered.
        max_running: requests beyond are refused.
        at_once: requests that are computed at the same time; others wait.
    """

    def __init__(
        self, stall: tuple[float, float] = (0.0, 0.0), max_running: int = 1000, at_once: int = 1000
    ) -> None:
        self.prompts: list[list[int]] = []
        self._stall, self._max_running = stall, max_running
        self._num_running = 0
        self._rows = asyncio.Semaphore(at_once)

    async def stream(self, token_ids: Sequence[int], num_output_tokens: int) -> AsyncIterator[list[int]]:
        self.prompts.append(list(token_ids))
        if self._num_running >= self._max_running:
            raise Overloaded("full")
        self._num_running += 1
        try:
            async with self._rows:
                await self._wait(TTFT_S)
                yield [7]
                for _ in range(num_output_tokens - 1):
                    await self._wait(ITL_S)
                    yield [7]
        finally:
            self._num_running -= 1

    async def _wait(self, seconds: float) -> None:
        loop, (begin, end) = asyncio.get_running_loop(), self._stall
        await asyncio.sleep(seconds)
        if begin <= loop.time() < end:
            await asyncio.sleep(end - loop.time())


def turns(count: int, apart_s: float, num_output_tokens: int = 5) -> list[list[Turn]]:
    return [[Turn(number * apart_s, [300 + number], num_output_tokens)] for number in range(count)]


def open_loop(server: Callable[[], Server], sessions: list[list[Turn]]) -> list[Outcome]:
    async def run() -> list[Outcome]:
        return await LoadGenerator(server()).open_loop(sessions)

    return simulated(run)


def test_delays_of_a_server_are_measured_exactly() -> None:
    outcomes = open_loop(Server, turns(50, 0.1))
    figures = Measures(outcomes, Targets()).figures()
    for share in ("p50", "p99"):
        assert figures["ttft_s"][share] == pytest.approx(TTFT_S, abs=1e-6)
        assert figures["itl_s"][share] == pytest.approx(ITL_S, abs=1e-6)
        assert figures["e2e_s"][share] == pytest.approx(TTFT_S + 4 * ITL_S, abs=1e-6)
    assert figures["offered_requests_per_s"] == pytest.approx(10.0)
    assert figures["lateness_s"]["p99"] == pytest.approx(0.0, abs=1e-6)


def test_stall_shows_in_every_request_that_was_due_meanwhile() -> None:
    """A generator that waited for answers would send one slow request instead of the hundred that were due."""
    outcomes = open_loop(lambda: Server(stall=(2.0, 12.0)), turns(200, 0.1))
    slow = [each.ttft_s for each in outcomes if 2.0 <= each.due_s + TTFT_S < 12.0]
    assert len(slow) == 100
    assert slow == pytest.approx(
        [12.0 - each.due_s for each in outcomes if 2.0 <= each.due_s + TTFT_S < 12.0]
    )
    assert summarize([each.ttft_s for each in outcomes])["p90"] > 5.0


def test_latency_counts_from_the_due_time_of_a_request_that_was_sent_late() -> None:
    outcome = Outcome(due_s=1.0, sent_s=3.0, token_times=[3.5, 3.6], ended_s=3.6)
    assert (outcome.ttft_s, outcome.e2e_s) == (2.5, 2.6)
    assert Measures([outcome], Targets()).figures()["lateness_s"]["p99"] == 2.0


def test_closed_loop_keeps_its_number_of_sessions() -> None:
    async def run() -> list[Outcome]:
        return await LoadGenerator(Server(max_running=4)).closed_loop(turns(20, 0.0), 4)

    outcomes = simulated(run)
    assert [each.error for each in outcomes] == [""] * 20
    assert max(each.ended_s for each in outcomes) == pytest.approx(5 * (TTFT_S + 4 * ITL_S))


def test_turns_of_a_session_repeat_what_was_said() -> None:
    server = None

    async def run() -> list[Outcome]:
        nonlocal server
        server = Server()
        session = [Turn(0.0, [1, 2], 2), Turn(3.0, [3], 1)]
        return await LoadGenerator(server).open_loop([session])

    first, second = simulated(run)
    assert server is not None
    assert server.prompts == [[1, 2], [1, 2, 7, 7, 3]]
    assert second.due_s == pytest.approx(first.ended_s + 3.0)


def test_errors_are_counted_by_kind() -> None:
    figures = Measures(open_loop(lambda: Server(max_running=1), turns(3, 0.01)), Targets()).figures()
    assert figures["errors"] == {"Overloaded": 2}
    assert figures["ttft_s"]["count"] == 1


def test_goodput_counts_requests_within_all_targets() -> None:
    outcomes = open_loop(lambda: Server(at_once=1), turns(10, 0.01))
    assert Measures(outcomes, Targets(ttft_s=1.0)).num_good == 3  # one is served per 0.33 s
    assert Measures(outcomes, Targets(itl_s=0.021)).num_good == 10
    assert Measures(outcomes, Targets(itl_s=0.019)).num_good == 0


def test_server_is_saturated_once_it_falls_behind() -> None:
    per_request_s = TTFT_S + 4 * ITL_S
    slow = Measures(open_loop(lambda: Server(at_once=1), turns(200, 0.5 * per_request_s)), Targets())
    fast = Measures(open_loop(lambda: Server(at_once=1), turns(200, 1.1 * per_request_s)), Targets())
    assert is_saturated(slow)
    assert not is_saturated(fast)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gaps_between_arrivals_have_the_wanted_mean_and_deviation(burstiness: float) -> None:
    sessions = draw_sessions(np.random.default_rng(0), Lengths(3, 2), 1000, rate=5.0, burstiness=burstiness)
    dues = [session[0].due_s for session in islice(sessions, 20_000)]
    gaps = np.diff(dues)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.06)


def test_confidence_interval_holds_the_quantile_and_shrinks() -> None:
    few, many = (
        summarize(np.random.default_rng(1).exponential(1.0, count).tolist()) for count in (100, 10_000)
    )
    for summary in (few, many):
        low, high = summary["p90_interval"]
        assert low <= np.log(10) <= high
    assert np.diff(many["p90_interval"]) < 0.3 * np.diff(few["p90_interval"])


def test_page_is_self_contained(tmp_path: Path) -> None:
    loads = [
        Measures(open_loop(Server, turns(20, apart_s)), Targets(), f"{1 / apart_s:g}/s")
        for apart_s in (0.5, 0.1)
    ]
    record = {"date": "today", "target": "<server>", "points": [each.figures() for each in loads]}
    path = tmp_path / "report.html"
    write_page(path, "Load", record, loads)
    html = path.read_text()
    assert html.count("<svg") == 4
    assert "&lt;server&gt;" in html
    for outside in ("src=", "href=", "<script", "@import"):
        assert outside not in html


def test_page_of_a_load_that_others_sent_has_its_tables(tmp_path: Path) -> None:
    figures = Measures(open_loop(Server, turns(5, 0.5)), Targets(), "2/s").figures()
    path = tmp_path / "report.html"
    write_page(path, "Load", {"date": "today", "target": "url", "points": [figures]}, [])
    assert path.read_text().count("<table") == 2
    assert "<svg" not in path.read_text()


def test_aiperf_gets_the_load_and_its_result_is_read(tmp_path: Path) -> None:
    load = AiperfLoad(
        model="m", tokenizer="dir", requests=10, rate=2.5, concurrency=None,
        input_tokens=100, output_tokens=20, warmup=2, seed=1, targets=Targets(ttft_s=0.25),
    )  # fmt: skip
    command = load.command("http://localhost:8000", tmp_path)
    assert command[:2] == ["aiperf", "profile"]
    assert command[command.index("--request-rate") + 1] == "2.5"
    assert command[command.index("--goodput") + 1] == "time_to_first_token:250"
    assert "--concurrency" not in command
    latency = {"unit": "ms", "avg": 20.0, "p50": 19.0, "p90": 25.0, "p99": 30.0, "count": 10}
    metrics = {
        **dict.fromkeys(("time_to_first_token", "inter_token_latency", "request_latency"), latency),
        "request_throughput": {"unit": "requests/sec", "avg": 2.4},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 48.0},
        "request_count": {"unit": "requests", "avg": 10.0},
    }
    with pytest.raises(ConfigError, match="left no profile_export_aiperf"):
        read_aiperf(tmp_path, "2.5/s")
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(metrics))
    figures = read_aiperf(tmp_path, "2.5/s")
    assert figures["ttft_s"]["p99"] == pytest.approx(0.03)
    assert (figures["requests"], figures["requests_per_s"], figures["errors"]) == (10, 2.4, {})
    _, (row, *_) = latency_table(figures)
    assert row == ["first token", "20.0 ms", "19.0 ms", "25.0 ms", "30.0 ms", ""]  # it has no intervals


@pytest.mark.parametrize("option", ["--sweep", "--turns=2", "--sigma=0.5", "--token-file=/dev/null"])
def test_options_that_aiperf_does_not_get_are_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "http://127.0.0.1:1", "--model", "m", option])
    assert result.exit_code == 2
    assert f"{option.split('=')[0]} is not passed to aiperf" in " ".join(result.output.split())


@pytest.fixture(scope="module")
def server(make_model: Callable[..., Path]) -> Iterator[ThreadedServer]:
    with threaded_server(make_model("llama")) as server:
        yield server


@pytest.mark.parametrize("load", [["--rate", "50", "--turns", "2"], ["--concurrency", "3"]])
def test_command_measures_a_server(server: ThreadedServer, tmp_path: Path, load: list[str]) -> None:
    path = tmp_path / "bench.json"
    sizes = ["--requests", "6", "--warmup", "1", "--input-tokens", "5", "--output-tokens", "4", *load]
    result = CliRunner().invoke(app, ["bench", "serve", server.server.target, *sizes, "--json", str(path)])
    assert result.exit_code == 0, result.output
    (point,) = json.loads(path.read_text())["points"]
    num_requests = 12 if "--turns" in load else 6
    assert (point["requests"], point["errors"]) == (num_requests, {})
    assert point["itl_s"]["count"] == 3 * num_requests
    assert "first token" in result.output


def test_command_replays_a_trace(server: ThreadedServer, tmp_path: Path) -> None:
    trace, path, html = tmp_path / "trace.csv", tmp_path / "bench.json", tmp_path / "bench.html"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,3\n1,6,2\n2,99999,2\n")
    options = ["--trace", str(trace), "--speed", "100", "--json", str(path), "--html", str(html)]
    result = CliRunner().invoke(app, ["bench", "serve", server.server.target, "--warmup", "0", *options])
    assert result.exit_code == 0, result.output
    (point,) = json.loads(path.read_text())["points"]
    assert point["requests"] == 2, "a request longer than the model's context is left out"
    assert "<svg" in html.read_text()


def test_command_refuses_loads_that_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "x:1", "--rate", "1", "--concurrency", "2"])
    assert result.exit_code == 2
