"""The ops that have a Triton kernel, and the kernels that their wrappers launch, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "kernels" / "gpu"
# Kernels of tokens in float8, which GPUs multiply from this compute capability on.
FLOAT8_KERNELS = {"quantize_tokens._quantize_tokens", "float8_groups._multiply_groups"}
FLOAT8_CAPABILITY = 89


def launched_kernels(capability: int) -> set[str]:
    """Return the kernels that some wrapper launches on a GPU, as ``module.function``."""
    trees = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
    homes = {name: module for module, tree in trees.items() for name in _decorated(tree, "triton.jit")}
    launched = {
        f"{homes[name]}.{name}" for tree in trees.values() for name in _launched(tree) if name in homes
    }
    return launched - FLOAT8_KERNELS if capability < FLOAT8_CAPABILITY else launched


def ops_with_kernels() -> set[str]:
    """Return the ops of kernels that a GPU computes by a Triton kernel."""
    trees = [ast.parse(path.read_text()) for path in FOLDER.parent.glob("*.py")]
    return {name for tree in trees for name in _decorated(tree, "on_gpu(")}


def _decorated(tree: ast.Module, start: str) -> Iterator[str]:
    """Yield the functions with a decorator whose source has this start."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(decorator).startswith(start) for decorator in node.decorator_list
        ):
            yield node.name


def _launched(tree: ast.Module) -> Iterator[str]:
    """Yield the names in calls of the form ``name[grid](...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield ast.unparse(node.func.value)
