"""The pictures of docs/tour.md, drawn from real runs of the demo model.

    python -m benchmarks.tour --out docs/images [--without-failover]

Four of them come from an engine in this process, whose plans are recorded on their way to the ranks; `failover` kills
a rank of `quire serve demo` with two ranks. Needs matplotlib, from the extra ``bench``.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.recovery import PROMPT, rank_pid, server
from quire import Client, SamplingParams
from quire.cluster.config.engine_options import DEMO_MODEL, EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.offline.in_process import load_in_process
from quire.cluster.simulation.replica import GATEWAY
from quire.cluster.text.requests.outputs import CompletionDelta
from quire.proto.block_tables import BlockTables, IntArray
from quire.proto.config import EngineConfig
from quire.proto.step import StepPlan, StepResult
from quire.proto.stream import GatewayMessage, ReplicaMessage, Submit, TokenBatch
from quire.scheduler import MeteredRanks, Scheduler, StepLoop, WorkerGroup

COLORS = ["tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:olive"]
EMPTY, CACHED, SHARED = "white", "0.85", "0.25"
NUM_STREAMS, NUM_TOKENS, NUM_BEFORE = 3, 400, 120
READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A request of a picture.

    Attributes:
        at_step: the step before which it arrives.
        shared: leading tokens that are those of every other request.
    """

    at_step: int
    num_prompt_tokens: int
    num_output_tokens: int
    shared: int = 0

    def prompt(self, number: int, vocab_size: int) -> IntArray:
        """Return the token ids; equal numbers give equal prompts."""
        common = np.random.default_rng(0).integers(300, vocab_size, self.shared)
        own = np.random.default_rng(number + 1).integers(
            300, vocab_size, self.num_prompt_tokens - self.shared
        )
        return np.concatenate([common, own]).astype(np.int32)


@dataclass(slots=True)
class Step:
    """A step as it was planned, and when its result came.

    Attributes:
        users: block id |-> the sequences whose tables have it, as numbers of requests.
        chunks: request |-> tokens of its prompt that the step computes.
    """

    begun_at: float
    users: dict[int, list[int]]
    chunks: dict[int, int]
    ended_at: float = 0.0

    def without_first(self, count: int) -> Step:
        """Return the step as if the first requests had not been."""
        users = {
            block_id: [n - count for n in numbers if n >= count] for block_id, numbers in self.users.items()
        }
        chunks = {number - count: length for number, length in self.chunks.items() if number >= count}
        return replace(
            self, users={block_id: numbers for block_id, numbers in users.items() if numbers}, chunks=chunks
        )


# Requests of one token each, whose steps are left out of the pictures.
WARM_UP = [Planned(step, 2, 1) for step in range(3)]


class RecordedRanks(MeteredRanks):
    """Ranks whose plans are recorded. Sequences count in the order in which they begin.

    Attributes:
        steps: so far.
    """

    def __init__(self, ranks: WorkerGroup, config: EngineConfig) -> None:
        num_rows = config.scheduler.max_num_seqs
        super().__init__(ranks, num_rows, time.perf_counter, lambda work, seconds: None)
        self.steps: list[Step] = []
        self._tables = BlockTables(num_rows, config.max_servable_tokens // config.cache.block_size + 1)
        self._numbers: dict[int, int] = {}  # seq_id |-> number of the request
        self._rows: dict[int, int] = {}  # row |-> number of the request

    def broadcast(self, plan: StepPlan) -> None:
        self._apply(plan)
        users: dict[int, list[int]] = {}
        for row, number in self._rows.items():
            for block_id in self._tables.row(row).tolist():
                users.setdefault(block_id, []).append(number)
        chunks = {
            self._rows[row]: length
            for row, length in zip(plan.chunk_rows.tolist(), plan.chunk_lens.tolist(), strict=True)
        }
        self.steps.append(Step(time.perf_counter(), users, chunks))
        super().broadcast(plan)

    def gather(self, timeout_s: float) -> StepResult | None:
        result = super().gather(timeout_s)
        if result is not None:
            next(step for step in self.steps if not step.ended_at).ended_at = time.perf_counter()
        return result

    def _apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date, as a rank does."""
        released = plan.released_rows.astype(np.intp)
        self._tables.trim(released, np.zeros(released.size, np.int32))
        for row in released.tolist():
            self._rows.pop(row, None)
        for new in plan.new:
            self._tables.put(new.row, new.block_ids)
            self._rows[new.row] = self._numbers.setdefault(new.seq_id, len(self._numbers))
        self._tables.trim(plan.trimmed_rows, plan.trimmed_lens)
        self._tables.append(plan.appended_rows, plan.appended_ids)


@dataclass(slots=True)
class Times:
    """Times of a request's arrival and of each of its tokens."""

    arrived_at: float
    tokens_at: list[float] = field(default_factory=list)


class Mailbox:
    """The mailbox of a step loop, which delivers requests before their steps and notes the times of tokens."""

    def __init__(self, requests: Sequence[Planned], vocab_size: int, ranks: RecordedRanks) -> None:
        self._requests, self._vocab_size, self._ranks = requests, vocab_size, ranks
        self._num_ended = 0
        self.times: list[Times] = []

    @property
    def is_done(self) -> bool:
        return self._num_ended == len(self._requests)

    def receive(self, timeout_s: float) -> list[tuple[bytes, GatewayMessage]]:
        due: list[tuple[bytes, GatewayMessage]] = []
        while len(self.times) < len(self._requests):
            number, planned = len(self.times), self._requests[len(self.times)]
            is_idle = timeout_s > 0 and not due
            if planned.at_step > len(self._ranks.steps) and not is_idle:
                break
            sampling = SamplingParams(
                max_tokens=planned.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True
            )
            prompt = planned.prompt(number, self._vocab_size)
            due.append((GATEWAY, Submit(number, f"request-{number}", prompt, sampling=sampling)))
            self.times.append(Times(time.perf_counter()))
        return due

    def send(self, gateway: bytes, message: ReplicaMessage) -> bool:
        assert isinstance(message, TokenBatch)
        for handle in message.handles.tolist():
            self.times[handle].tokens_at.append(time.perf_counter())
        self._num_ended += len(message.finished)
        return True

    def wake(self) -> None: ...


def record(
    config: EngineConfig, ranks: WorkerGroup, requests: Sequence[Planned]
) -> tuple[list[Step], list[Times], int]:
    """Run requests; return the steps, the times of each request and the number of preemptions."""
    ranks.rebuild(1)  # empties the rows that an earlier scheduler left, and makes the first step slow
    recorded = RecordedRanks(ranks, config)
    later = [replace(each, at_step=each.at_step + len(WARM_UP)) for each in requests]
    mailbox = Mailbox([*WARM_UP, *later], config.model.vocab_size, recorded)
    scheduler = Scheduler(config)
    loop = StepLoop(scheduler, recorded, mailbox, "tour", time.perf_counter)
    while not mailbox.is_done:
        loop.turn()
    steps = [step.without_first(len(WARM_UP)) for step in recorded.steps[len(WARM_UP) :]]
    return steps, mailbox.times[len(WARM_UP) :], scheduler.stats.num_preemptions


def draw_blocks(axis: Axes, steps: Sequence[Step], num_blocks: int, num_requests: int) -> None:
    """Draw the pool over time: a column per step, a row per block, in the color of the sequence that has it."""
    image = np.ones((num_blocks, len(steps), 3))
    was_used: set[int] = set()
    for column, step in enumerate(steps):
        for block_id in was_used:
            image[block_id, column] = to_rgb(CACHED)
        for block_id, numbers in step.users.items():
            image[block_id, column] = to_rgb(SHARED if len(numbers) > 1 else COLORS[numbers[0] % len(COLORS)])
        was_used |= set(step.users)
    axis.imshow(image, origin="lower", aspect="auto", interpolation="nearest")
    axis.set_xlabel("step")
    axis.set_ylabel("block")
    names = [(f"request {number + 1}", COLORS[number % len(COLORS)]) for number in range(num_requests)]
    names += [("shared", SHARED), ("free, content cached", CACHED)]
    axis.legend(
        handles=[Patch(color=color, label=name) for name, color in names],
        fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )


def draw_life(axis: Axes, steps: Sequence[Step], times: Sequence[Times]) -> None:
    """Draw a line per request: its wait, the chunks of its prompt, and a tick for each token."""
    start = times[0].arrived_at
    for number, each in enumerate(times):
        chunks = [step for step in steps if number in step.chunks]
        color, place = COLORS[number % len(COLORS)], -number
        axis.barh(
            place,
            1e3 * (chunks[0].begun_at - each.arrived_at),
            0.5,
            1e3 * (each.arrived_at - start),
            color=CACHED,
        )
        for step in chunks:
            axis.barh(
                place, 1e3 * (step.ended_at - step.begun_at), 0.5, 1e3 * (step.begun_at - start), color=color
            )
        axis.plot(
            1e3 * (np.array(each.tokens_at) - start), np.full(len(each.tokens_at), place), "|", color=color
        )
    axis.set_yticks(
        [-number for number in range(len(times))], [f"request {n + 1}" for n in range(len(times))]
    )
    axis.set_xlabel("milliseconds")
    axis.legend(
        handles=[
            Patch(color=CACHED, label="waits"),
            Patch(color=COLORS[0], label="chunks of the prompt; | a token"),
        ],
        fontsize=7,
        loc="upper right",
    )


def draw_failover(axis: Axes) -> None:
    """Draw the tokens of streams of a real server over time, of which one rank is killed."""
    with server(DEMO_MODEL, []) as (_, client, _):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1, temperature=0.8)
        undisturbed = client.generate(PROMPT, params).outputs[0].token_ids
        streams = [_Stream(client, params) for _ in range(NUM_STREAMS)]
        for stream in streams:
            stream.has_begun.wait(READY_TIMEOUT_S)
        killed_at = time.monotonic()
        os.kill(rank_pid(client, 1), signal.SIGKILL)
        for stream in streams:
            stream.thread.join(READY_TIMEOUT_S)
            assert stream.token_ids == list(undisturbed), "a token differs from the undisturbed run"
    start = min(stream.times[0] for stream in streams)
    for number, stream in enumerate(streams):
        axis.step(np.array(stream.times) - start, stream.counts, where="post", color=COLORS[number],
                  label=f"stream {number + 1}")  # fmt: skip
    axis.axvline(killed_at - start, color="tab:red", linewidth=0.8, label="rank 1 is killed")
    axis.set_xlabel("seconds")
    axis.set_ylabel("tokens")
    axis.legend(fontsize=7)


class _Stream:
    """A stream on a thread of its own, with the time of each update."""

    def __init__(self, client: Client, params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.counts: list[int] = []
        self.has_begun = threading.Event()
        self._events = client.generate_stream(PROMPT, params)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for event in self._events:
            if isinstance(event, CompletionDelta):
                self.token_ids += event.token_ids
                self.times.append(time.monotonic())
                self.counts.append(len(self.token_ids))
                if len(self.token_ids) >= NUM_BEFORE:
                    self.has_begun.set()


def save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the pictures")
    parser.add_argument("--without-failover", action="store_true", help="leave out the server")
    arguments = parser.parse_args()
    options = EngineOptions(DEMO_MODEL, max_num_seqs=4, num_kv_blocks=65, max_num_batched_tokens=128)
    config, ranks = load_in_process(resolve(options, Machine.this()))

    figure, axis = plt.subplots(figsize=(8, 2.8))
    requests = [
        Planned(0, 200, 30),
        Planned(4, 60, 40),
        Planned(8, 300, 20),
        Planned(9, 40, 30),
        Planned(10, 90, 16),
    ]
    steps, times, _ = record(config, ranks, requests)
    draw_life(axis, steps, times)
    save(figure, arguments.out / "tour_life.png")

    for name, requests, num_blocks in (
        ("blocks", [Planned(0, 120, 60), Planned(6, 40, 90), Planned(20, 200, 40), Planned(80, 90, 40)], 48),
        ("sharing", [Planned(0, 180, 30, 160), Planned(20, 200, 40, 160), Planned(25, 190, 40, 160),
                     Planned(80, 170, 20, 160)], 40),
        ("preemption", [Planned(0, 64, 120), Planned(2, 80, 100), Planned(4, 48, 110)], 24),
    ):  # fmt: skip
        own = replace(config, cache=replace(config.cache, num_kv_blocks=num_blocks + 1))
        steps, _, num_preemptions = record(own, ranks, requests)
        assert (name == "preemption") == (num_preemptions > 0), f"{name} has {num_preemptions} preemptions"
        figure, axis = plt.subplots(figsize=(8, 3.2))
        draw_blocks(axis, steps, num_blocks + 1, len(requests))
        save(figure, arguments.out / f"tour_{name}.png")
    ranks.close()

    if not arguments.without_failover:
        figure, axis = plt.subplots(figsize=(8, 2.6))
        draw_failover(axis)
        save(figure, arguments.out / "tour_failover.png")


if __name__ == "__main__":
    main()
