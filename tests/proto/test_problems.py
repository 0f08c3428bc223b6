"""Problems: errors of independent checks, raised together."""

from __future__ import annotations

import pytest

from quire.proto.errors import ConfigError, ModelLoadError, Problems


def collect(*errors: Exception) -> Problems:
    problems = Problems()
    for error in errors:
        with problems:
            raise error
    return problems


def test_no_problem_raises_nothing() -> None:
    Problems().raise_any()


def test_single_error_keeps_its_class() -> None:
    with pytest.raises(ModelLoadError, match="the only one"):
        collect(ModelLoadError("the only one")).raise_any()


def test_several_errors_become_one_that_names_each_once() -> None:
    nested = ConfigError.of(["b", "c"])
    with pytest.raises(ConfigError, match=r"^a; b; c$") as caught:
        collect(ConfigError("a"), nested, ConfigError("c")).raise_any()
    assert caught.value.problems == ("a", "b", "c")


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        collect(KeyError("x"))
