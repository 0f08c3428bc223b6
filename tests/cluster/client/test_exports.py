"""The names of the package `quire`, and what importing them loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import quire
from quire import scheduler, worker

HEAVY = ("torch", "transformers", "ray", "zmq", "grpc")


def loaded_by(statement: str) -> set[str]:
    """The heavy modules that a new interpreter has loaded after the statement."""
    program = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", quire.__all__)
def test_exported_name_can_be_imported(name: str) -> None:
    assert getattr(quire, name) is not None
    assert name in dir(quire)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clint'"):
        _ = quire.Clint


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import quire", set()),
        ("from quire import SamplingParams, RequestOutput, CompletionDelta, FleetInfo, Deployment", set()),
        ("from quire import Client, AsyncClient", {"grpc"}),
        ("from quire.worker import available_bytes, library_state", set()),
        ("from quire.scheduler import KvTiers, Rebuilt", set()),
    ],
)
def test_import_loads_no_more_than_it_needs(statement: str, expected: set[str]) -> None:
    assert loaded_by(statement) == expected


@pytest.mark.parametrize("package", [quire, scheduler, worker], ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_are_exported(package: ModuleType) -> None:
    assert package.__file__ is not None
    tree = ast.parse(Path(package.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    shown = {alias.asname for node in imports for alias in node.names} - {None}
    assert shown == set(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
