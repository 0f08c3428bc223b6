"""TraceRecorder: recorded traces have arrivals, lengths and shared prefixes, and nothing of the texts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quire.cluster.cli import app
from quire.cluster.gateway.tracing.trace_recorder import TraceRecorder, recorded_trace
from quire.cluster.simulation.recorded import read_latencies
from quire.cluster.simulation.traces import TraceFile
from quire.cluster.text.requests.outputs import CompletionDelta
from quire.cluster.text.requests.request import Request
from quire.proto.errors import ConfigError, RequestAborted
from quire.proto.sampling import SamplingParams

CALL: Any = SimpleNamespace(model="", request_id="", tenant="", trace_headers={})
SHARED = list(range(100, 132))


def request(token_ids: list[int], tenant: str = "") -> Request:
    return Request("id", np.array(token_ids, np.int32), SamplingParams(), tenant=tenant)


class Session:
    """A recorder on a clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.now, self._file = 0.0, path.open("w")
        self.recorder = TraceRecorder(self._file, lambda: self.now)

    def begin(self, token_ids: list[int], tenant: str = "") -> Any:
        watch = self.recorder.watch(CALL)
        watch.on_accepted("tiny", request(token_ids, tenant))
        return watch

    def close(self) -> None:
        self.recorder.close()
        self._file.close()


def test_trace_has_arrivals_lengths_and_latencies_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    session = Session(path)
    session.now = 50.0
    slow = session.begin([*SHARED, 1])
    session.now = 51.5
    fast = session.begin([*SHARED, *range(200, 240)])
    session.now = 52.0
    fast.on_event(CompletionDelta(0, "ab", [7, 8]))
    fast.on_end(None)
    assert path.read_text() == "", "an earlier request has not ended"
    session.now = 53.0
    slow.on_event(CompletionDelta(0, "c", [9]))
    slow.on_end(RequestAborted("left"))
    session.close()
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["arrival_s"], first["prompt_tokens"], first["output_tokens"]) == (0.0, 33, 1)
    assert first["error"] == "RequestAborted"
    assert (second["arrival_s"], second["ttft_s"], second["e2e_s"]) == (1.5, 0.5, 0.5)
    traced = list(TraceFile(path))
    assert [(each.arrival_s, each.num_prompt_tokens, each.num_output_tokens) for each in traced] == [
        (0.0, 33, 1),
        (1.5, 72, 2),
    ]
    one, other = (each.prompt() for each in traced)
    assert (one[:32] == other[:32]).all()
    assert one[32] != other[32]
    latencies = read_latencies(path)
    assert latencies.ttft.count == 1
    assert latencies.ttft.quantile(0.5) == pytest.approx(0.5, rel=0.01)


def test_tenants_and_processes_have_no_names_in_common(tmp_path: Path) -> None:
    names = []
    for number in range(2):
        session = Session(tmp_path / f"{number}.jsonl")
        for tenant in ("a", "b"):
            watch = session.begin(SHARED, tenant)
            names += watch.row["prefix_block_hashes"]
            watch.on_end(None)
        session.close()
    assert len(set(names)) == len(names) == 8


def test_refused_call_is_not_recorded(tmp_path: Path) -> None:
    session = Session(tmp_path / "day.jsonl")
    session.recorder.watch(CALL).on_end(ConfigError("no"))
    session.close()
    assert (tmp_path / "day.jsonl").read_text() == ""


def test_requests_that_run_at_the_end_are_written(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    with recorded_trace(path) as (observer,):
        observer.watch(CALL).on_accepted("tiny", request([1, 2]))
    assert json.loads(path.read_text())["prompt_tokens"] == 2


def test_recording_never_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="cannot be made: File exists"), recorded_trace(path):
        pass
    assert path.read_text() == "precious"


def test_replay_shows_what_a_change_makes_different(tmp_path: Path, make_model: Any) -> None:
    path = tmp_path / "day.jsonl"
    session = Session(path)
    for number in range(12):
        session.now = 0.01 * number
        watch = session.begin([1000 + 60 * number + place for place in range(20)])
        watch.on_event(CompletionDelta(0, "", list(range(10))))
        watch.on_end(None)
    session.close()
    command = [
        "replay",
        str(path),
        "--model",
        str(make_model("llama")),
        "--gpu",
        "cpu",
        "--change",
        "max_num_seqs=1",
    ]
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "replay.json")])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "replay.json").read_text())
    before, after = record["as_served"], record["changed"]
    assert before["requests"] == after["requests"] == 12
    assert before["errors"] == {}
    assert after["ttft_s"]["p99"] > 2 * before["ttft_s"]["p99"]
    assert "recorded" in result.output


@pytest.mark.parametrize(
    ("change", "problem"),
    [("max_num_seq=1", "did you mean 'max_num_seqs'"), ("max_num_seqs", "must be NAME=VALUE")],
)
def test_replay_refuses_changes_that_it_does_not_know(tmp_path: Path, change: str, problem: str) -> None:
    path = tmp_path / "day.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,3\n")
    result = CliRunner().invoke(app, ["replay", str(path), "--model", "demo", "--change", change])
    assert problem in str(result.exception)
