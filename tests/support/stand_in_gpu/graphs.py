"""Recordings of calls on the stand-in GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .current import current_gpu

# Content of memory that the device has not written yet.
GARBAGE = 77


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call.

    Attributes:
        read, written: CPU tensors of its arguments.
        results: CPU tensors that it returned; a replay overwrites them.
    """

    run: Callable[[], Any]
    read: list[Tensor]
    written: list[Tensor]
    results: list[Tensor]


@dataclass(eq=False)
class Graph:
    """A recording: calls in order.

    Attributes:
        allocated: tensors that the recording allocated, while it is made.
    """

    calls: list[Call] = field(default_factory=list)
    allocated: list[Tensor] = field(default_factory=list)

    def add(self, call: Callable[[], Any], read: list[Tensor], written: list[Tensor]) -> Any:
        """Record a call and return its results, which the calls that follow need to run; nothing is overwritten."""
        saved = [each.clone() for each in written]
        found = call()
        for each, held in zip(written, saved, strict=True):
            each.copy_(held)  # a recording executes nothing
        results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        given = {each.untyped_storage().data_ptr() for each in read}
        self.allocated += [
            each for each in results if each.untyped_storage().data_ptr() not in given and each.numel()
        ]
        self.calls.append(Call(call, read, written, results))
        return found

    def end(self) -> None:
        """End the recording: what it allocated holds garbage until a replay."""
        for each in self.allocated:
            each.fill_(GARBAGE if each.dtype != torch.bool else True)
        self.allocated.clear()

    def replay(self) -> None:
        gpu = current_gpu()
        gpu.num_replays += 1
        gpu.stream.time += 1
        for call in self.calls:
            gpu.note_use(call.read, [*call.written, *call.results])
            found = [each for each in tree_leaves(call.run()) if isinstance(each, Tensor)]
            for target, result in zip(call.results, found, strict=True):
                if target.data_ptr() != result.data_ptr():
                    target.copy_(result)
