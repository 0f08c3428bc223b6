"""Dispatch of an op to its Triton kernel on a GPU, and to its PyTorch reference everywhere else.

A kernel is imported when its op first gets a tensor on a GPU: importing Triton is slow, and machines without Triton
use the references.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_COMPILATIONS = f"{__package__}.gpu.compilations"


def on_gpu(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Dispatch a reference to its kernel, the function of the same name and signature in ``kernels.gpu.<module>``.

    The first argument must be a tensor; its device selects the implementation.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(reference)
        def op(*args: P.args, **kwargs: P.kwargs) -> R:
            if not has_kernels(args[0]):
                return reference(*args, **kwargs)
            kernel: Callable[P, R] = getattr(_load(module), reference.__name__)
            return kernel(*args, **kwargs)

        return op

    return decorate


def twin_of(op: Callable[P, R]) -> Callable[P, R]:
    """Return the PyTorch reference of an op, for arguments that its kernel does not support."""
    reference: Callable[P, R] = cast(Any, op).__wrapped__
    return reference


def has_kernels(tensor: object) -> bool:
    """Return whether ops on this tensor run Triton kernels."""
    return cast(Any, tensor).is_cuda and _has_triton()


def num_compilations() -> int:
    """Return the number of kernel variants that this process has compiled, or loaded from Triton's cache on disk."""
    module: Any = sys.modules.get(_COMPILATIONS)
    return 0 if module is None else int(module.num_compilations())


def is_compiling() -> bool:
    """Return whether a launch of this process compiles a kernel variant, or failed to; any thread may call it."""
    module: Any = sys.modules.get(_COMPILATIONS)
    return module is not None and bool(module.is_compiling())


def forget_failed_compilation() -> None:
    """Let `is_compiling` be false after a launch that failed."""
    module: Any = sys.modules.get(_COMPILATIONS)
    if module is not None:
        module.forget_failure()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _load(module: str) -> Any:
    importlib.import_module(_COMPILATIONS).count_compilations()
    return importlib.import_module(f"{__package__}.gpu.{module}")
