"""DeviceTensor: a tensor on the stand-in GPU, and conversions of trees of such tensors."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .current import current_gpu
from .streams import DEVICE


class DeviceTensor(Tensor):
    """A tensor on the stand-in GPU.

    Attributes:
        host: its numbers, on the CPU.
    """

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return current_gpu().run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()


def find_host_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree that are on the host."""
    leaves = tree_leaves(unpack(tree))
    return [each for each in leaves if isinstance(each, Tensor) and not isinstance(each, DeviceTensor)]


def find_device_tensors(tree: Any) -> list[DeviceTensor]:
    """Return the tensors of a tree that are on the device."""
    return [each for each in tree_leaves(unpack(tree)) if isinstance(each, DeviceTensor)]


def host_parts(tree: Any) -> list[Tensor]:
    """Return the CPU tensors of all device tensors of a tree."""
    return [each.host for each in find_device_tensors(tree)]


def unpack(value: Any) -> Any:
    """Return a tree in which dataclasses are dicts."""
    if isinstance(value, (list, tuple)):
        return [unpack(each) for each in value]
    if isinstance(value, dict):
        return {key: unpack(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: unpack(getattr(value, each.name)) for each in fields(value)}
    return value


def on_host(value: Any) -> Any:
    """Return the same tree with the CPU tensors of device tensors."""
    if isinstance(value, DeviceTensor):
        return value.host
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_host(each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(each) for each in value)
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: on_host(getattr(value, each.name)) for each in fields(value) if each.init}
        )
    return value
