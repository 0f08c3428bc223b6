"""`python -m benchmarks.families`: engines that take turns, and what is told of a missing one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import families, figure_tables
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import EngineFailed


class FakeEngine:
    """Takes a millisecond per prompt token and four per decoded one; llama.cpp is not installed."""

    load_s = 0.5

    def __init__(
        self,
        name: str,
        environments: Path | None,
        options: Sequence[str],
        log: Path,
        timeout_s: float,
        *,
        counts_processor_time: bool,
    ) -> None:
        self._factor = 2 if counts_processor_time else 1
        if name == "llama.cpp" and not (environments is not None and (environments / name).exists()):
            raise EngineFailed("is not installed")
        assert environments is None or name == "llama.cpp", "quire and transformers are those of this process"
        assert options[:2] == ["--model-dir", str(log.parents[1] / "model")]

    def seconds(self, requests: Requests, timeout_s: float) -> float:
        ((prompt, num_tokens),) = requests
        return (len(prompt) + 4 * (num_tokens - 1)) / 1000 / self._factor

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def begin_close(self) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "Engine", FakeEngine)


def test_speeds_of_engines_that_take_turns(tmp_path: Path) -> None:
    (tmp_path / "llama.cpp").mkdir()
    figures = families.measure_speeds(tmp_path / "model", ["quire", "transformers", "llama.cpp"], tmp_path)
    assert set(figures) == {
        f"{engine}.{figure}_tokens_per_s"
        for engine in ("quire", "transformers", "llama_cpp")
        for figure in ("prefill", "decode")
    }
    assert figures["llama_cpp.prefill_tokens_per_s"].value == pytest.approx(1000)
    assert figures["llama_cpp.decode_tokens_per_s"].value == pytest.approx(250)


def test_processor_time_is_that_of_the_engines(tmp_path: Path) -> None:
    figures = families.measure_speeds(tmp_path / "model", ["quire"], tmp_path, counts_processor_time=True)
    assert figures["quire.prefill_tokens_per_s"].value == pytest.approx(2000)


def test_missing_llama_cpp_is_left_out_with_the_reason(tmp_path: Path) -> None:
    figures = families.measure_speeds(tmp_path / "model", ["quire", "llama.cpp"], tmp_path)
    assert figures["llama_cpp.load.failed_after_s"].note == "llama.cpp is not installed"
    assert [name for name in figures if name.startswith("llama_cpp")] == ["llama_cpp.load.failed_after_s"]
    assert figures["quire.decode_tokens_per_s"].value == pytest.approx(250)


def test_kind_without_peer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(families.LLAMA_CPP) < set(families.KINDS)
    monkeypatch.setattr("sys.argv", ["families", "--peers", "DIR", "--kinds", "lfm2,recurrent_gemma"])
    with pytest.raises(SystemExit):
        families.main()
    assert "llama.cpp has no recurrent_gemma" in capsys.readouterr().err


def test_table_shows_engines_side_by_side() -> None:
    values = {"lfm2.quire.a": 3.0, "lfm2.transformers.a": 2.0, "lfm2.llama_cpp.a": 4.0, "mamba.quire.a": 5.0}
    figures = {f"families.{name}": {"value": value} for name, value in values.items()}
    figures |= {
        f"families.{name}": {"value": 1.0}
        for name in ("mamba.llama_cpp.load.failed_after_s", "x.llama_cpp.a")
    }
    assert figure_tables.by_engine("model type", a="decode")(figures)[2:] == [
        "| lfm2 | 3 / 2 / 4 |",
        "| mamba | 5 |",
        "| x | - / - / 1 |",
    ]
