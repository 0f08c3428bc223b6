"""GrammarWorkers: compiled grammars, hostile constraints, processes that end, and the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.text.requests.grammar_compiler import LocalGrammarCompiler
from quire.cluster.text.sandbox import compiling, grammar_workers, worker_pool
from quire.cluster.text.sandbox.grammar_workers import GrammarWorkers
from quire.proto.config import EngineConfig
from quire.proto.errors import InvalidRequest, Overloaded, ReplicaUnavailable
from quire.proto.structured_outputs import StructuredOutputsParams
from quire.worker.structured.compilation import MAX_COMPILED_BYTES


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return resolve(EngineOptions("demo", device="cpu"), Machine.this())


@pytest.fixture(scope="module")
def workers(config: EngineConfig) -> Iterator[GrammarWorkers]:
    workers = GrammarWorkers(config, 1)
    yield workers
    workers.close()


def nested(depth: int) -> object:
    schema: object = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_worker_compiles_as_the_caller_would(workers: GrammarWorkers, config: EngineConfig) -> None:
    for form in (
        StructuredOutputsParams(json={"type": "integer", "multipleOf": 3}),
        StructuredOutputsParams(choice=["a", "b"]),
        StructuredOutputsParams(regex="a+"),
    ):
        assert workers.compile(form) == LocalGrammarCompiler(config).compile(form)


def test_unsupported_constraint_is_refused_by_keyword(workers: GrammarWorkers) -> None:
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json: is not supported.*uniqueItems"):
        workers.compile(StructuredOutputsParams(json={"type": "array", "uniqueItems": True}))


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(regex="(a{1,1000}){1,1000}(b{1,1000}){1,1000}"),
        StructuredOutputsParams(regex="(" * 5000 + "a" + ")" * 5000),
        StructuredOutputsParams(grammar="root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
        StructuredOutputsParams(grammar="root ::= root root | root"),
        StructuredOutputsParams(json={"type": "string", "pattern": "(([a-z]{1,500}){1,500}){1,500}"}),
        StructuredOutputsParams(json={"type": "array", "minItems": 10**9, "items": {"type": "null"}}),
    ],
    ids=["repeated", "nested", "nested-grammar", "left-recursive", "pattern", "items"],
)
def test_hostile_constraint_is_bounded(
    workers: GrammarWorkers, form: StructuredOutputsParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_workers, "COMPILE_TIME_S", 2)
    with suppress(InvalidRequest):
        assert len(workers.compile(form)) <= MAX_COMPILED_BYTES + 1
    assert workers.compile(StructuredOutputsParams(choice=["still", "here"]))


def test_deeply_nested_schema_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        StructuredOutputsParams(json=nested(200))  # type: ignore[arg-type]
    deep = "[" * 100_000
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        StructuredOutputsParams(json=f'{{"enum": {deep}')
    with pytest.raises(InvalidRequest, match="must have 1 to"):
        StructuredOutputsParams(json={"enum": ["x" * 600_000]})


@pytest.mark.parametrize("depth", [64, 65])
def test_depth_of_a_schema_includes_its_scalars(depth: int) -> None:
    """A value in an object of 63 levels is on level 64."""
    schema: Any = 1
    for _ in range(depth - 1):
        schema = {"default": schema}
    if depth == 64:
        assert StructuredOutputsParams(json=schema).kind == "json"
    else:
        with pytest.raises(InvalidRequest, match="at most 64 levels"):
            StructuredOutputsParams(json=schema)


def test_schema_of_many_values_is_refused_before_it_is_written() -> None:
    with pytest.raises(InvalidRequest, match="more than 65536 values"):
        StructuredOutputsParams(json={"enum": [1] * 65_536})
    with pytest.raises(InvalidRequest, match="more than 65536 values"):
        StructuredOutputsParams(json='{"enum": [' + "[], " * 100_000 + "[]]}")


def test_answers_are_kept(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, asked = GrammarWorkers(config, 0), list[str]()

    def run(task: dict[str, Any], timeout_s: float) -> dict[str, object]:
        asked.append(json.dumps(task["spec"]))
        return {"problem": "too odd"} if "odd" in asked[-1] else {"compiled": asked[-1].encode()}

    monkeypatch.setattr(workers, "run", run)
    params = [StructuredOutputsParams(choice=[f"choice {number}"]) for number in range(8)]
    odd = StructuredOutputsParams(choice=["odd"])
    assert workers.compile(params[0]) == workers.compile(params[0]) == asked[0].encode()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="is not supported: too odd"):
            workers.compile(odd)
    assert len(asked) == 2
    monkeypatch.setattr(grammar_workers, "MAX_CACHE_BYTES", 5000)  # four answers, and no fifth
    for each in params:
        workers.compile(each)
    num_asked = len(asked)
    workers.compile(params[-1])
    assert len(asked) == num_asked
    workers.compile(params[0])
    assert len(asked) == num_asked + 1


def test_without_a_free_worker_the_request_may_come_back(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "QUEUE_TIMEOUT_S", 0.01)
    with pytest.raises(Overloaded, match="no process was free"):
        GrammarWorkers(config, 0).compile(StructuredOutputsParams(choice=["a"]))


def test_late_answer_of_a_busy_machine_is_not_kept(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(task: object, timeout_s: float) -> object:
        raise TimeoutError

    workers, params = GrammarWorkers(config), StructuredOutputsParams(choice=["a"])
    monkeypatch.setattr(workers, "run", run)
    with pytest.raises(Overloaded, match="has not answered for"):
        workers.compile(params)
    monkeypatch.setattr(workers, "run", lambda *_: {"compiled": b"compiled"})
    assert workers.compile(params) == b"compiled"
    workers.close()


def test_grammar_whose_workers_are_killed_is_unavailable(config: EngineConfig) -> None:
    """A killed process is no fault of the grammar: the refusal is not kept."""
    workers, params = GrammarWorkers(config, 1), StructuredOutputsParams(choice=["a"])
    (worker,) = workers._workers
    start = worker.start

    def start_and_kill() -> None:
        start()
        worker.kill()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "start", start_and_kill)
            with pytest.raises(ReplicaUnavailable, match="was killed twice"):
                workers.compile(params)
        assert workers.compile(params)
    finally:
        workers.close()


# Five calls for three workers, which are stopped as they start: two wait when the pool is closed.
CLOSED_UNDER_LOAD = """
import functools, os, signal, threading
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.text.sandbox import grammar_workers
from quire.proto.errors import ShuttingDown
from quire.proto.structured_outputs import StructuredOutputsParams

grammar_workers.TASK_TIMEOUT_S = 3600
workers = grammar_workers.GrammarWorkers(resolve(EngineOptions("demo", device="cpu"), Machine.this()))

def stop_after(worker, start):
    start()
    os.kill(worker.process.pid, signal.SIGSTOP)

def compile():
    try:
        workers.compile(StructuredOutputsParams(choice=["a"]))
    except ShuttingDown as error:
        ended.append(str(error))  # threads that print at once mix their lines

ended = []
is_full = threading.Event()
for worker in workers._workers:
    worker.start = functools.partial(stop_after, worker, worker.start)
wait_for_idle = workers._wait_for_idle
def waiting():
    if workers._num_waiting == 1:
        is_full.set()
    wait_for_idle()
workers._wait_for_idle = waiting
threads = [threading.Thread(target=compile) for _ in range(5)]
for thread in threads:
    thread.start()
is_full.wait()
workers.close()
for thread in threads:
    thread.join()
for line in ended:
    print(line)
print("closed", workers._num_waiting, [worker.process.returncode for worker in workers._workers])
"""


def test_close_ends_compilations_that_run_and_wait() -> None:
    command = [sys.executable, "-c", CLOSED_UNDER_LOAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    assert done.stdout.splitlines() == [
        *["the gateway stops, with its processes to compile the grammar"] * 5,
        "closed 0 [-9, -9, -9]",
    ]
    assert done.stderr == ""


def test_grammar_that_ranks_read_for_long_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = config.model
    carry_out = compiling.prepare(msgpack.packb((model.path, model.vocab_size, model.eos_token_ids, "auto")))
    task = {"spec": {"kind": "regex", "text": "a+"}, "time_s": 600}
    assert "compiled" in carry_out(task)
    monkeypatch.setattr(compiling, "MAX_LOAD_S", 0.0)
    assert "ms to read it" in carry_out(task)["problem"]
