"""Goodput of `quire serve` under more load than it can serve, over gRPC and HTTP.

    python -m benchmarks.overload_server --json benchmarks/results/overload_server.json

Goodput counts the output tokens per second of requests that were complete before their deadline; without deadlines,
of all that were complete. The peak is that of clients that send their next request when the last one is complete, as
many as the server has rows. Other work on the machine changes it, from 302 to 549 tokens/s in one run: so peaks and
overloads alternate in short windows, each overload is compared with the peaks before and after it, and the figures
are medians. In the overload requests arrive independently of each other at 10 times the rate of the first peak.
`light_tenant` is the share of the calls of a tenant with a fifth of the load that were complete beside a tenant with
10 times the load. The load comes from this process, on the same machine as the server.

A refusal costs the caller and the gateway milliseconds of the cores that the ranks need.
`refusal_caller_ms` and `refusal_server_ms` are the CPU time of this process, and of the server's processes except the
ranks, that an overload took more than the peak for as many complete calls, per refused call. In production callers
run elsewhere: `at_10x_per_core` compares goodput per core that the callers leave, that is, over the number of cores
less the mean number of cores that this process used.
With the demo model 10 times the load would be 120 calls per second, a third of two cores; so a random model of 60
million parameters is served.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks.common import Figure, make_parser, names_from, report
from benchmarks.overload_calls import Call, Door, closed_loop, goodput, grpc_door, http_door, open_loop, send
from benchmarks.overload_cpu import CpuMeter, CpuTimes
from benchmarks.random_models import make_model
from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.client.wire.tokens import BEARER, new_token

MODEL = "s"
NUM_TOKENS = 128
NUM_ROWS = 4
MAX_QUEUE_LEN = 16
OPTIONS = "--max-num-seqs", str(NUM_ROWS), "--max-queue-len", str(MAX_QUEUE_LEN), "--policy", "fair"
FACTOR = 10.0
WARM_UP_S = 3.0
NUM_CORES = len(os.sched_getaffinity(0))
NUM_REPEATS = 5
READY_TIMEOUT_S = 300.0
# Deadline over the time of a request at the peak.
DEADLINE_FACTOR = 3.0
LIGHT_SHARE = 0.2
TENANTS = "heavy", "light"
PROTOCOLS = "grpc", "http"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that the server does without overload.

    Attributes:
        cpu_per_call: CPU time per complete call.
        callers_cores: cores that the callers used.
    """

    tokens_per_s: float
    latency_s: float
    cpu_per_call: CpuTimes
    callers_cores: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.tokens_per_s / NUM_TOKENS


@asynccontextmanager
async def running_server() -> AsyncIterator[tuple[CpuMeter, dict[tuple[str, str], Door]]]:
    """Run a server; yield the meter of its CPU time, and (protocol, tenant) |-> sender of calls."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder / MODEL, MODEL)
        path = folder / "tokens"
        made = {tenant: new_token(tenant) for tenant in TENANTS}
        path.touch(mode=0o600)
        path.write_text("".join(f"{token.line()}\n" for _, token in made.values()))
        started = ServerProcess(str(folder / MODEL), *OPTIONS, "--token-file", str(path))
        stack.callback(started.close)
        await asyncio.to_thread(started.wait_ready, READY_TIMEOUT_S)
        doors: dict[tuple[str, str], Door] = {}
        for tenant, (secret, _) in made.items():
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(started.address))
            doors["grpc", tenant] = grpc_door(channel, NUM_TOKENS, BEARER + secret)
            doors["http", tenant] = await stack.enter_async_context(
                http_door(started.http_url, MODEL, NUM_TOKENS, BEARER + secret)
            )
        yield CpuMeter(started.process.pid), doors


async def measure_peak(door: Door, meter: CpuMeter, seconds: float) -> Peak:
    start, before = time.monotonic(), meter.read()
    calls = await closed_loop(door, NUM_ROWS, seconds)
    spent = meter.read() - before
    return Peak(
        goodput(calls, start + WARM_UP_S, start + seconds),
        statistics.median(each.seconds for each in calls),
        spent / len(calls),
        spent.callers_s / (time.monotonic() - start),
    )


@dataclass(slots=True)
class Overload:
    """Overloads of one kind.

    Attributes:
        shares: the goodput of each over the peaks before and after it.
        shares_per_core: the same per core that the callers leave.
        refusal_cpu: CPU time of each per refused call.
    """

    calls: list[Call] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    shares_per_core: list[float] = field(default_factory=list)
    refusal_cpu: list[CpuTimes] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)

    def add(
        self,
        calls: Sequence[Call],
        tokens_per_s: float,
        spent: CpuTimes,
        seconds: float,
        peaks: Sequence[Peak],
    ) -> None:
        """Add an overload.

        Args:
            spent: CPU time until all calls had ended.
            seconds: of the load. The calls that end after it take little of the callers' time.
            peaks: before and after it.
        """
        self.calls += calls
        self.shares.append(tokens_per_s / statistics.mean(peak.tokens_per_s for peak in peaks))
        per_core = statistics.mean(peak.tokens_per_s / (NUM_CORES - peak.callers_cores) for peak in peaks)
        self.shares_per_core.append(tokens_per_s / (NUM_CORES - spent.callers_s / seconds) / per_core)
        num_complete = sum(call.is_complete for call in calls)
        if num_complete < len(calls):
            per_call = (peaks[0].cpu_per_call + peaks[1].cpu_per_call) / 2
            self.refusal_cpu.append((spent - per_call * num_complete) / (len(calls) - num_complete))


async def measure_overloads(
    door: Door, meter: CpuMeter, seconds: float, cases: Mapping[str, float | None]
) -> tuple[list[Peak], dict[str, Overload]]:
    """Return the peaks, and kind |-> overloads, of which peaks were measured before and after each.

    Args:
        cases: kind |-> deadline over the latency at the first peak; None without deadlines.
    """
    peaks = [await measure_peak(door, meter, seconds)]
    overloads = {name: Overload() for name in cases}
    for number in range(NUM_REPEATS):
        for name, factor in cases.items():
            timeout_s = None if factor is None else factor * peaks[0].latency_s
            start, before = time.monotonic(), meter.read()
            calls = await open_loop(door, FACTOR * peaks[0].rate, seconds, timeout_s, random.Random(number))
            spent = meter.read() - before
            reached = goodput(calls, start + WARM_UP_S, start + seconds)
            overload = overloads[name]
            overload.after_s.append((await send(door, None)).seconds)
            peaks.append(await measure_peak(door, meter, seconds))
            overload.add(calls, reached, spent, seconds, peaks[-2:])
    return peaks, overloads


def figures_of(name: str, overload: Overload, note: str) -> dict[str, Figure]:
    calls = overload.calls
    return {
        f"{name}.at_10x": Figure(
            100 * statistics.median(overload.shares),
            "%",
            f"goodput over its peak, {_range(overload.shares)}; {note}",
        ),
        f"{name}.at_10x_per_core": Figure(
            100 * statistics.median(overload.shares_per_core),
            "%",
            f"the same per core that the callers leave, {_range(overload.shares_per_core)}",
        ),
        **_refusal_cpu(name, overload.refusal_cpu),
        f"{name}.wasted_calls": Figure(
            100 * sum(each.is_late for each in calls) / len(calls),
            "%",
            "calls that missed their deadline instead of being refused",
        ),
        **_refusals(name, calls),
        f"{name}.after_s": Figure(
            statistics.median(overload.after_s), "s", "a call alone after the overload"
        ),
    }


def _range(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} in {len(shares)} windows"


def _refusal_cpu(name: str, times: Sequence[CpuTimes]) -> dict[str, Figure]:
    if not times:
        return {}
    callers_ms = 1e3 * statistics.median(each.callers_s for each in times)
    server_ms = 1e3 * statistics.median(each.server_s for each in times)
    return {
        f"{name}.refusal_caller_ms": Figure(callers_ms, "ms", "CPU time of the callers per refused call"),
        f"{name}.refusal_server_ms": Figure(
            server_ms, "ms", "CPU time of gateway, scheduler and Ray per refused call"
        ),
    }


def _refusals(name: str, calls: Sequence[Call]) -> dict[str, Figure]:
    refused = [each for each in calls if each.error == "OVERLOADED"]
    hopeless = [each for each in calls if each.error == "DEADLINE_EXPIRED" and not each.is_late]
    others = [each for each in calls if each.error not in ("", "OVERLOADED", "DEADLINE_EXPIRED")]
    figures = {
        f"{name}.other_errors": Figure(len(others), "calls"),
        f"{name}.hopeless_calls": Figure(
            100 * len(hopeless) / len(calls), "%", "calls that were refused as too late even alone"
        ),
    }
    if refused:
        delays = [each.retry_s for each in refused if each.retry_s is not None]
        figures[f"{name}.refused_with_delay"] = Figure(100 * len(delays) / len(refused), "%", "of refusals")
        figures[f"{name}.retry_p50_s"] = Figure(statistics.median(delays), "s", "delay that refusals name")
        milliseconds = statistics.median(1e3 * each.seconds for each in refused)
        figures[f"{name}.refusal_p50_ms"] = Figure(milliseconds, "ms", "until the refusal")
    return figures


async def measure_fairness(
    name: str, heavy: Door, light: Door, peak: Peak, seconds: float
) -> dict[str, Figure]:
    timeout_s = DEADLINE_FACTOR * peak.latency_s
    of_heavy, of_light = await asyncio.gather(
        open_loop(heavy, FACTOR * peak.rate, seconds, timeout_s, random.Random(2)),
        open_loop(light, LIGHT_SHARE * peak.rate, seconds, timeout_s, random.Random(3)),
    )
    share, of_others = (
        100 * sum(each.is_complete for each in calls) / len(calls) for calls in (of_light, of_heavy)
    )
    return {
        f"{name}.light_tenant": Figure(share, "%", f"of {len(of_light)} calls were complete in time"),
        f"{name}.heavy_tenant": Figure(of_others, "%", "of the other tenant's calls"),
    }


async def measure(seconds: float, protocols: Sequence[str]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    async with running_server() as (meter, doors):
        await closed_loop(doors["grpc", "heavy"], NUM_ROWS, WARM_UP_S)
        for protocol in protocols:
            heavy, name = doors[protocol, "heavy"], f"overload.{protocol}"
            cases = {"deadline": DEADLINE_FACTOR, "none": None}
            peaks, overloads = await measure_overloads(heavy, meter, seconds, cases)
            rates = [peak.tokens_per_s for peak in peaks]
            figures[f"{name}.peak"] = Figure(
                statistics.median(rates),
                "tokens/s",
                f"{min(rates):.0f} to {max(rates):.0f}, {NUM_ROWS} clients",
            )
            notes = {
                "deadline": f"deadlines of {DEADLINE_FACTOR * peaks[0].latency_s:.1f} s",
                "none": f"no deadlines, {MAX_QUEUE_LEN} requests may wait",
            }
            for case, overload in overloads.items():
                figures |= figures_of(f"{name}.{case}", overload, notes[case])
            light = doors[protocol, "light"]
            figures |= await measure_fairness(name, heavy, light, peaks[-1], seconds)
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--protocols", type=names_from(PROTOCOLS), default=PROTOCOLS, metavar="A,B")
    arguments = parser.parse_args()
    report(asyncio.run(measure(arguments.seconds, arguments.protocols)), arguments.json)


if __name__ == "__main__":
    main()
