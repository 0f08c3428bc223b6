"""A substitute for CUDA graphs on a CPU: records tensor operations and repeats them on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from quire.worker.graphs.graphs import Recording

# Operations that read a value back, for which a device would have to wait.
_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class TapeBackend:
    """A graph backend with a GPU's rules: replays run no Python, tensors stay in place, and no value is read back.

    Attributes:
        num_recorded, num_replays: counts so far.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0

    def warm_up(self, compute: Callable[[], Tensor]) -> None:
        compute()

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        tape = _Tape()
        with tape:
            output = compute()
        assert tape.calls, "nothing was recorded"
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            tape.repeat()

        return Recording(replay, output)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in _READS:
            raise RuntimeError(f"{name} waits for the device while a graph is recorded")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tree_flatten(out)[0]))
        return out

    def repeat(self) -> None:
        for func, args, kwargs, places in self.calls:
            found = tree_flatten(func(*args, **kwargs))[0]
            for place, result in zip(places, found, strict=True):
                # A view, or a tensor written in place, has the result already.
                if isinstance(place, Tensor) and place.data_ptr() != result.data_ptr():
                    place.copy_(result)


def on_one_launch(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an op that the tape records as one operation, as it does a kernel, whatever the function does inside."""
    op = torch.library.custom_op(f"quire_tests::{name}", function, mutates_args=())
    return lambda *args: op(*args)
