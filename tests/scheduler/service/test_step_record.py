"""Recorded steps: all work of a server is in the file, also after its ranks failed, and the file costs no request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import FakeWorkerGroup, small_config, submit

from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError, RankFailed
from quire.proto.stream import ReplicaMessage, TokenBatch
from quire.scheduler import InMemoryMailbox, Scheduler, StepLoop
from quire.scheduler.service import step_record
from quire.scheduler.service.step_meter import StepWork
from quire.scheduler.service.step_record import StepRecord, read_steps, recorded_ranks

GATEWAY = b"gateway"
PROMPTS = [list(range(2, 2 + length)) for length in (3, 17, 40)]


def config_of(folder: Path) -> EngineConfig:
    return small_config(record_steps=str(folder), prefix_caching=False, max_num_batched_tokens=16)


class Server:
    """A step loop over fake ranks whose steps are recorded."""

    def __init__(self, config: EngineConfig, ranks: FakeWorkerGroup, loop: StepLoop) -> None:
        self.ranks, self.loop = ranks, loop
        self.mailbox = InMemoryMailbox()
        self.num_ended = 0

    def on_message(self, message: ReplicaMessage) -> None:
        if isinstance(message, TokenBatch):
            self.num_ended += len(message.finished)


@contextmanager
def served(config: EngineConfig) -> Iterator[Server]:
    ranks, mailbox = FakeWorkerGroup(config), InMemoryMailbox()
    with recorded_ranks(ranks, config, "demo/0") as group:
        server = Server(config, ranks, StepLoop(Scheduler(config), group, mailbox, "demo/0"))
        server.mailbox = mailbox
        mailbox.connect(GATEWAY, server.on_message)
        yield server


def run(server: Server, first_handle: int = 0, num_tokens: int = 5) -> None:
    for number, prompt in enumerate(PROMPTS):
        server.mailbox.post(
            GATEWAY, submit(first_handle + number, prompt, max_tokens=num_tokens, ignore_eos=True)
        )
    ended = server.num_ended + len(PROMPTS)
    while server.num_ended < ended:
        server.loop.turn()


def file_in(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def num_computed(path: Path) -> int:
    return sum(step.work.num_tokens for step in read_steps(path)[1])


def test_file_has_the_work_of_all_steps_and_no_text(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with served(config) as server:
        run(server)
    facts, steps = read_steps(file_in(tmp_path))
    assert facts["tensor_parallel_size"] == 1
    assert facts["dtype"] == config.model.dtype
    # The last token of each output is sampled and not computed; of two steps in flight the second may be for nothing.
    least = sum(len(prompt) + 4 for prompt in PROMPTS)
    assert least <= num_computed(file_in(tmp_path)) <= least + len(PROMPTS)
    assert sum(step.work.num_new for step in steps) == len(PROMPTS)
    chunk_pairs = {step.work.num_pairs for step in steps if step.work.num_new}
    assert 0 not in chunk_pairs
    assert all(step.seconds >= 0 for step in steps)
    rows = [json.loads(line) for line in file_in(tmp_path).read_text().splitlines()[1:]]
    assert all(
        len(row) == len(facts["columns"]) and all(isinstance(each, (int, float)) for each in row)
        for row in rows
    )


def test_rows_are_counted_anew_when_ranks_were_rebuilt(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with served(config) as server:
        run(server)
        server.ranks.failure = RankFailed(0, "killed")
        server.mailbox.post(GATEWAY, submit(10, PROMPTS[0], max_tokens=5, ignore_eos=True))
        while not server.ranks.rebuilt:
            server.loop.turn()
            server.ranks.failure = None
        while server.num_ended < len(PROMPTS) + 1:
            server.loop.turn()
    least = sum(len(prompt) + 4 for prompt in [*PROMPTS, PROMPTS[0]])
    assert least <= num_computed(file_in(tmp_path)) <= least + len(PROMPTS) + 1


def test_most_steps_bound_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_record, "MAX_STEPS", 4)
    with served(config_of(tmp_path)) as server:
        run(server)
    assert len(read_steps(file_in(tmp_path))[1]) == 4


def test_full_disk_ends_the_record_and_no_request() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    record = StepRecord(full.open("w"), {})
    for _ in range(10_000):
        record.add(StepWork(1, 1, 1), 0.1)
    record.close()


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"record_steps: .*nowhere.* cannot be made"), served(config):
        pass


def test_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    with served(config_of(tmp_path)) as server:
        run(server)
    path = file_in(tmp_path)
    whole = read_steps(path)[1]
    path.write_text(path.read_text()[:-5])
    assert read_steps(path)[1] == whole[:-1]


@pytest.mark.parametrize(
    "text", ["", "{}\n", "[]\n", '{"kind": "steps"}\nnonsense\n', '{"kind": "steps"}\n[1]\n']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_steps(path)


def test_without_the_option_the_ranks_are_used_as_they_are() -> None:
    config = small_config()
    ranks = FakeWorkerGroup(config)
    with recorded_ranks(ranks, config, "demo") as group:
        assert group is ranks
