"""Which implementation of an op runs: its Triton kernel on a GPU, its PyTorch twin everywhere else.

Kernels are imported when the first tensor on a GPU asks for one: Triton takes its time to import, and a machine
without it computes on the twins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def on_gpu(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Gives a twin its kernel: the function of the same name and signature in ``kernels.gpu.<module>``.

    The device of the first argument, a tensor, decides.
    """

    def decorate(twin: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(twin)
        def op(*args: P.args, **kwargs: P.kwargs) -> R:
            if not has_kernels(args[0]):
                return twin(*args, **kwargs)
            kernel: Callable[P, R] = getattr(_load(module), twin.__name__)
            return kernel(*args, **kwargs)

        return op

    return decorate


def has_kernels(tensor: object) -> bool:
    return cast(Any, tensor).is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _load(module: str) -> Any:
    return importlib.import_module(f"{__package__}.gpu.{module}")
