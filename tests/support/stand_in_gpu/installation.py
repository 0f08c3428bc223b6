"""Installation of the stand-in GPU in place of torch's CUDA."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_group import ThreadGroup
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels import dispatch

from . import current
from .device_tensor import DeviceTensor
from .gpu import StandInGpu
from .graphs import Graph
from .streams import Event, Stream

# torch's device types CUDA and Meta, as numbers.
_CUDA, _META = 1, 14


@contextmanager
def installed(
    monkeypatch: pytest.MonkeyPatch,
    gpu: StandInGpu | None = None,
    stand_in: Callable[[str, str], Callable[..., Any]] | None = None,
) -> Iterator[StandInGpu]:
    """Install the device for the body, on this thread and those of ThreadGroups.

    Args:
        stand_in: (module, name) of a kernel's wrapper |-> the function to call instead. None calls the wrappers; then
            Triton must run in its interpreter.
    """
    device = gpu or StandInGpu()
    with monkeypatch.context() as patch:
        _patch_torch(patch, device)
        load = dispatch._load

        def load_for_device(module: str) -> Any:
            class Kernels:
                def __getattr__(self, name: str) -> Any:
                    kernel = getattr(load(module), name) if stand_in is None else stand_in(module, name)
                    return lambda *args, **kwargs: device.launch_kernel(name, kernel, args, kwargs)

            return Kernels()

        patch.setattr(dispatch, "_load", load_for_device)
        patch.setattr(current, "gpu", device)
        patch.setattr(ThreadGroup, "around", staticmethod(lambda: _DeviceMode(device)))
        with _DeviceMode(device):
            yield device
        gc.collect()  # pinned memory is unregistered while there is a device


class _DeviceMode(TorchDispatchMode):
    """Makes new tensors of the device, and pinned memory; ops on its tensors come to DeviceTensor."""

    def __init__(self, gpu: StandInGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        transfers = self._gpu.transfers
        name = func._schema.name.rpartition("::")[2]
        if name == "_pin_memory":
            return transfers.pin(args[0])
        if name == "is_pinned":
            return transfers.is_pinned(args[0])
        device = kwargs.get("device")
        is_on_device = device is not None and torch.device(device).type == "cuda"
        if is_on_device or any(isinstance(each, DeviceTensor) for each in tree_leaves((args, kwargs))):
            return self._gpu.run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return transfers.pin(func(*args, **kwargs | {"pin_memory": False}))
        return func(*args, **kwargs)


def _patch_torch(patch: pytest.MonkeyPatch, gpu: StandInGpu) -> None:
    _use_guard_of_meta()
    # Views of tensors that are made outside inference mode do not work inside it for subclasses.
    patch.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad())

    def device_index(index: int) -> Any:
        return gpu.on_stream(gpu.stream)

    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: gpu.stream,
        "stream": gpu.on_stream,
        "graph": gpu.record,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": lambda: gpu.recording is not None,
        "synchronize": lambda device=None: gpu.host_waits("synchronize", None),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (gpu.total_memory - gpu.allocated, gpu.total_memory),
        "memory_reserved": lambda device=None: gpu.allocated,
        "memory_allocated": lambda device=None: gpu.allocated,
        "max_memory_allocated": lambda device=None: gpu.peak,
        "reset_peak_memory_stats": lambda device=None: setattr(gpu, "peak", gpu.allocated),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=gpu.total_memory),
        "cudart": lambda: _Cudart(gpu.transfers.pinned_addresses),
    }
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    make_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        """Stand in for torch.tensor, which copies inside C++."""
        made = make_tensor(data, **more)
        return made if device is None else made.to(device)

    patch.setattr(torch, "tensor", tensor)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.accelerator, "device_index", device_index)
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    patch.setattr(Tensor, "pin_memory", lambda tensor: gpu.transfers.pin(tensor))


class _Cudart:
    """CUDA's runtime, as far as it locks host memory."""

    def __init__(self, pinned_addresses: set[int]) -> None:
        self._pinned_addresses = pinned_addresses

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self._pinned_addresses.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._pinned_addresses.discard(address)
        return 0


def _use_guard_of_meta() -> None:
    """Let C++ guards of CUDA devices do nothing, as those of meta tensors; a build without CUDA has none."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[_CUDA]:
        guards[_CUDA] = guards[_META]
