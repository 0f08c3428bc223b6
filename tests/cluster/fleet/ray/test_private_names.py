"""Only `compat` uses Ray's private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.cluster.fleet.ray import compat

PACKAGE = Path(quire.__file__).parent
FOLDERS = ("proto", "kernels", "worker", "scheduler", "cluster")
# Modules of Ray without an underscore that Ray documents as internal.
PRIVATE_MODULES = ("ray.core.generated", "ray.experimental.internal_kv", "ray.autoscaler.v2", "ray.scripts")


def private_names(source: str) -> set[str]:
    """Return the private names of Ray that a module imports, reads, or passes to a function of Ray."""
    return {name for node in ast.walk(ast.parse(source)) for name in _names_of(node) if _is_private(name)}


def _names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node)
    elif isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        yield from (f"{function}.{keyword.arg}" for keyword in node.keywords if keyword.arg is not None)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _is_private(name: str) -> bool:
    root, *parts = name.split(".")
    if root != "ray" or not all(part.isidentifier() for part in parts):
        return False
    has_underscore = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return has_underscore or name.startswith(PRIVATE_MODULES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ray._private.state import state", {"ray._private.state.state"}),
        ("import ray.core.generated.gcs_pb2", {"ray.core.generated.gcs_pb2"}),
        ("from ray.experimental import internal_kv", {"ray.experimental.internal_kv"}),
        (
            "ray._raylet.Config.initialize('')",
            {"ray._raylet", "ray._raylet.Config", "ray._raylet.Config.initialize"},
        ),
        ("ray.init(_temp_dir='x')", {"ray.init._temp_dir"}),
        ("run('-m', 'ray.scripts.scripts')", {"ray.scripts.scripts"}),
        ("import ray; ray.get(x); from ray.util import placement_group; print(ray.__version__)", set()),
        ("from .ray_runtime import _private", set()),
    ],
)
def test_private_names_are_found(source: str, found: set[str]) -> None:
    assert private_names(source) == found


def test_only_compat_uses_private_names_of_ray() -> None:
    modules = [path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    assert len(modules) > 100
    users = {str(path.relative_to(PACKAGE)): private_names(path.read_text()) for path in modules}
    only = str(Path(compat.__file__).relative_to(PACKAGE))
    assert users.pop(only)
    assert {path: names for path, names in users.items() if names} == {}
