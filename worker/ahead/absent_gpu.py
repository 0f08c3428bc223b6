"""A GPU that is not there: its tensors have shapes and addresses, and hold zeros that take no memory.

A rank prepares itself on it as on a real one, and its launches show which kernel variants it needs. Zeros are a valid
value of everything that a rank reads back: token ids, block ids and lengths. Ops on large tensors compute nothing.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..weights.safetensors_file import SafetensorsFile

DEVICE = torch.device("cuda", 0)
# An op with a larger tensor computes nothing.
MAX_ELEMENTS = 1 << 18
# Addresses of torch's allocations are multiples of it, which specializes kernels.
_ALIGNMENT = 512
_UNINITIALIZED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
# torch's device types CUDA and Meta, as numbers.
_CUDA, _META = 1, 14


class AbsentTensor(Tensor):
    """A tensor on the absent GPU.

    Attributes:
        host: its zeros, on the CPU.
    """

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> AbsentTensor:
        made: AbsentTensor = Tensor._make_wrapper_subclass(
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
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return _ALIGNMENT + int(self.host.storage_offset()) * self.host.element_size()


def zeros(shape: Any, dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU, in memory that is not there until it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < mmap.PAGESIZE:
        return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op with a tensor of the device, or that makes one."""
    name = func._schema.name.rpartition("::")[2]
    device = kwargs.get("device")
    if name == "_to_copy" and device is not None and torch.device(device).type == "cpu":
        return args[0].host.to(kwargs.get("dtype") or args[0].dtype, copy=True)
    if name == "copy_" and not isinstance(args[0], AbsentTensor):
        return args[0].copy_(args[1].host)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}
    own, own_kwargs = _map(_host_of, args), _map(_host_of, kwargs)
    if device is not None:
        own_kwargs["device"] = "cpu"
    arguments = func._schema.arguments
    writes = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    views = any(each.alias_info is not None for each in arguments) and not writes
    if views or not (name in _UNINITIALIZED or _is_large((own, own_kwargs)) or _makes_large(func, own)):
        found = func(*own, **own_kwargs)
    elif writes:
        values = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        return values[writes[0]]
    else:
        found = _zeros_like_result(func, own, own_kwargs)
    return _map(AbsentTensor, found)


def _zeros_like_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return zeros of the shapes that an op returns."""
    args, kwargs = _map(_meta_of, args), _map(_meta_of, kwargs)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    return _map(_from_meta, func(*args, **kwargs))


def _from_meta(each: Tensor) -> Tensor:
    if each.numel() == 0:
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
    length = 1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
    return zeros((length,), each.dtype).as_strided(each.shape, each.stride())


def _meta_of(each: Tensor) -> Tensor:
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")


def _host_of(each: Tensor) -> Tensor:
    return each.host if isinstance(each, AbsentTensor) else each


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the same arguments or results with the function's results instead of tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map(function, each) for each in value])
    if isinstance(value, dict):
        return {key: _map(function, each) for key, each in value.items()}
    return value


def _any_tensor(is_true: Callable[[Tensor], bool], value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_true(value)
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, (list, tuple)) and any(_any_tensor(is_true, each) for each in value)


def _is_large(tree: Any) -> bool:
    return _any_tensor(lambda each: each.numel() > MAX_ELEMENTS, tree)


def _makes_large(func: Any, args: Any) -> bool:
    """Return whether an op that makes a tensor, such as ``zeros``, makes a large one."""
    shape = args[0] if args and func._schema.arguments[0].name == "size" else ()
    return math.prod(shape) > MAX_ELEMENTS


class _AbsentMode(TorchDispatchMode):
    """Makes new tensors of the device; ops on its tensors come to AbsentTensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if name in ("_pin_memory", "is_pinned"):
            return args[0] if name == "_pin_memory" else True
        device = kwargs.get("device")
        is_on_device = device is not None and torch.device(device).type == "cuda"
        if is_on_device or _any_tensor(lambda each: isinstance(each, AbsentTensor), (args, kwargs)):
            return _run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event, on which nothing ever runs."""

    device = DEVICE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait_stream = wait_event = wait = _ignore

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Graph:
    """A recording, whose replays do nothing."""

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def install(capability: int, total_memory: int) -> None:
    """Put the device in place of torch's CUDA for the rest of this process, on this thread.

    Args:
        capability: compute capability times 10.
        total_memory: bytes.
    """
    _use_guard_of_meta()
    properties = SimpleNamespace(total_memory=total_memory)
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    stands_in: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "stream": _nothing,
        "graph": _nothing,
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (total_memory, total_memory),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: divmod(capability, 10),
        "get_device_properties": lambda device=None: properties,
        "cudart": lambda: cudart,
    }
    for name, value in stands_in.items():
        setattr(torch.cuda, name, value)
    for name, value in {
        "current_device_index": lambda: 0,
        "device_index": _nothing,
        "empty_cache": lambda: None,
    }.items():
        setattr(torch.accelerator, name, value)
    # Views of tensors that are made outside inference mode do not work inside it for subclasses.
    torch._C._InferenceMode = lambda mode: torch.no_grad()  # type: ignore
    make_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        """Stand in for torch.tensor, which copies inside C++."""
        made = make_tensor(data, **more)
        return made if device is None else made.to(device)

    torch.tensor = tensor  # type: ignore[assignment]
    read_into = SafetensorsFile.read_into

    def read_host_tensors(file: SafetensorsFile, out: Tensor, *args: Any, **kwargs: Any) -> int:
        return out.nbytes if isinstance(out, AbsentTensor) else read_into(file, out, *args, **kwargs)

    SafetensorsFile.read_into = read_host_tensors  # type: ignore[assignment]
    _AbsentMode().__enter__()  # type: ignore[no-untyped-call]


def _use_guard_of_meta() -> None:
    """Let C++ guards of CUDA devices do nothing, as those of meta tensors; a build without CUDA has none."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]
