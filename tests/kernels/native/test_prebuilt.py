"""Libraries that a wheel brings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from quire.kernels.native import build, prebuilt
from quire.kernels.native.instruction_sets import Choice, all_choices, instruction_set
from quire.kernels.native.sources import sources_digest

# Writes its arguments into the output file.
FAKE_COMPILER = """#!/bin/sh
arguments="$*"
while [ "$1" != -o ]; do shift; done
echo "$arguments" > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path) -> list[str]:
    path = tmp_path / "compiler"
    path.write_text(FAKE_COMPILER)
    path.chmod(0o755)
    return [str(path), "--first-argument"]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("x86_64", {"amx", "avx512", "avx512+avx512_bf16", "avx2", "baseline"}),
        ("aarch64", {"neon", "baseline"}),
    ],
)
def test_prebuild_makes_a_library_for_each_choice(
    machine: str, expected: set[str], compiler: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "ops-of-another-machine.so").touch()
    prebuilt.prebuild(folder, all_choices(machine), compiler)
    assert {path.name for path in folder.glob("*.so")} == {f"ops-{name}.so" for name in expected}
    for choice in all_choices(machine):
        found = prebuilt.find_prebuilt(choice, folder)
        assert found is not None
        arguments = found.read_text().split()
        assert arguments[0] == "--first-argument"
        assert set(choice.flags) <= set(arguments)


def test_sources_that_change_during_a_build_fail_it(
    compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(("before", "after"))
    monkeypatch.setattr(prebuilt, "sources_digest", lambda: next(digests))
    with pytest.raises(RuntimeError, match=r"the C\+\+ sources changed while they were compiled"):
        prebuilt.prebuild(tmp_path / "prebuilt", all_choices("x86_64"), compiler)


def test_library_of_other_sources_is_not_used(compiler: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "prebuilt"
    prebuilt.prebuild(folder, all_choices("x86_64"), compiler)
    (folder / "sources.sha256").write_text("0" * 64)
    assert prebuilt.find_prebuilt(Choice("avx2", (), ()), folder) is None


def test_choice_without_a_library_is_compiled(tmp_path: Path) -> None:
    assert prebuilt.find_prebuilt(Choice("avx2", (), ()), tmp_path) is None


def test_prebuilt_library_is_loaded_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = build.load_library()
    if compiled is None:
        pytest.skip("there is no C++ compiler")
    name = f"ops-{instruction_set()}.so"
    (tmp_path / name).symlink_to(compiled._name)
    (tmp_path / "sources.sha256").write_text(sources_digest())
    monkeypatch.setattr(build, "find_prebuilt", lambda chosen: prebuilt.find_prebuilt(chosen, tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        loaded = build.load_library.__wrapped__()
    assert loaded is not None
    assert loaded._name == str(tmp_path / name)
    assert not (tmp_path / "cache").exists()
