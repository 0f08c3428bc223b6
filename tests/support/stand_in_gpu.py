"""A GPU that is not there: tensors on ``cuda:0`` that hold host memory, with a GPU's rules and without its kernels.

Ops on its tensors run at once on the CPU and give real numbers; Triton kernels run in Triton's interpreter. These
mistakes, which only a GPU would show otherwise, raise an error or leave wrong numbers:

- an op that mixes tensors on the host and on the device;
- a copy of memory that is not pinned, which makes the host wait (`num_syncs` counts these, reads of a value, and
  `synchronize`), or a pinned source that changes before its copy has run;
- a result on the host that is read before its event: its memory holds garbage until then;
- a tensor used on a stream that does not wait for the stream that wrote it, or written where another still reads it;
- anything in a recording that waits for the device; tensors that a recording allocates hold garbage until a replay.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from quire.kernels import dispatch

DEVICE = torch.device("cuda", 0)
GARBAGE = 77
# torch's device types CUDA and Meta, as numbers.
_CUDA, _META = 1, 14
_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")
# Kernels that write to some of their arguments.
_WRITERS = (
    "fused_qk_norm_rope_kv_write",
    "add_rms_norm",
    "add_rms_norm_float8",
    "copy_blocks",
    "update_block_tables",
    "all_reduce_add_rms_norm",
)


class StreamError(AssertionError):
    """Two streams use the same memory, and neither waits for the other."""


class HostWaitError(RuntimeError):
    """The host would wait for the device where it must not."""


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
        gpu = StandInGpu.current
        assert gpu is not None, "the stand-in GPU is not installed any more"
        return gpu.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()


@dataclass(eq=False)
class Stream:
    """A stream.

    Attributes:
        time: ops launched so far.
        seen: stream |-> its time that this stream has waited for.
    """

    device: torch.device = DEVICE
    time: int = 0
    seen: dict[Stream, int] = field(default_factory=dict)

    def wait_stream(self, other: Stream) -> None:
        for stream, time in ((other, other.time), *other.seen.items()):
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def wait_event(self, event: Event) -> None:
        for stream, time in event.snapshot.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _gpu().host_waits("stream.synchronize", self.seen | {self: self.time})


class Event:
    """An event; `snapshot` maps each stream to its time when the event was recorded."""

    def __init__(self, **_: Any) -> None:
        self.snapshot: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _gpu().stream
        self.snapshot = stream.seen | {stream: stream.time}

    def synchronize(self) -> None:
        _gpu().host_waits("event.synchronize", self.snapshot)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _gpu().stream).wait_event(self)

    def query(self) -> bool:
        return False


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

    def replay(self) -> None:
        gpu = _gpu()
        gpu.num_replays += 1
        gpu.stream.time += 1
        for call in self.calls:
            gpu.note_use(call.read, [*call.written, *call.results])
            found = [each for each in tree_leaves(call.run()) if isinstance(each, Tensor)]
            for target, result in zip(call.results, found, strict=True):
                if target.data_ptr() != result.data_ptr():
                    target.copy_(result)


class StandInGpu:
    """The device; `installed` puts it in place of torch's CUDA.

    Attributes:
        num_syncs: how often the host waited, by cause.
        num_launches, num_replays: kernels launched outside recordings, and replays.
        allocated: bytes of device memory, and their peak.
    """

    current: StandInGpu | None = None

    def __init__(self, total_memory: int = 1 << 30) -> None:
        self.total_memory = total_memory
        self.default_stream = Stream()
        self.num_syncs: dict[str, int] = defaultdict(int)
        self.num_launches = self.num_replays = 0
        self.allocated = self.peak = 0
        self.recording: Graph | None = None
        self._streams = threading.local()
        self._writes: dict[int, tuple[Stream, int]] = {}  # address of a storage |-> its last writer
        self._reads: dict[int, dict[Stream, int]] = {}  # the same |-> readers since then
        self._pending: list[tuple[Stream, int, Callable[[], None]]] = []  # copies to the host
        self.pinned_addresses: set[int] = set()  # of storages
        self._sources: list[tuple[Tensor, Tensor]] = []  # pinned sources of copies, and what they held

    @property
    def stream(self) -> Stream:
        """Current stream of this thread."""
        found: Stream = getattr(self._streams, "current", self.default_stream)
        return found

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        previous, self._streams.current = self.stream, stream
        try:
            yield
        finally:
            self._streams.current = previous

    @contextmanager
    def record(
        self, graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any
    ) -> Iterator[None]:
        """Stand in for torch.cuda.graph."""
        assert self.recording is None, "a recording is under way"
        with self.on_stream(stream or Stream()):
            self.stream.wait_stream(self.default_stream)
            self.recording = graph
            try:
                yield
            finally:
                self.recording = None
                for each in graph.allocated:
                    each.fill_(GARBAGE if each.dtype != torch.bool else True)
                graph.allocated.clear()

    def host_waits(self, cause: str, until: dict[Stream, int] | None) -> None:
        """Let the host wait until streams have reached a time; None: all of them, now."""
        if self.recording is not None:
            raise HostWaitError(f"{cause} waits for the device while a graph is recorded")
        self.num_syncs[cause] += 1
        for source, held in self._sources:
            assert torch.equal(source, held), "a pinned source changed before its copy to the device had run"
        self._sources.clear()
        self._run_pending(until)

    def _run_pending(self, until: dict[Stream, int] | None) -> None:
        """Run the copies to the host that streams have reached; None: all."""
        left = []
        for stream, time, copy in self._pending:
            if until is not None and until.get(stream, 0) < time:
                left.append((stream, time, copy))
            else:
                copy()
        self._pending = left

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        address = pinned.untyped_storage().data_ptr()
        self.pinned_addresses.add(address)
        weakref.finalize(pinned.untyped_storage(), self.pinned_addresses.discard, address)
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned_addresses

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op with at least one tensor of the device, or that makes one."""
        name = func._schema.name.rpartition("::")[2]
        device = kwargs.get("device")
        if name == "_to_copy" and device is not None and torch.device(device).type == "cpu":
            return self._copy_to_host(args[0], kwargs)
        if name == "_to_copy" and not isinstance(args[0], DeviceTensor):
            return self._copy_to_device(args[0], kwargs)
        if name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
            return self._copy_between(*args, **kwargs)
        if name in _READS or (name.startswith("index") and _has_mask(args)):
            self.host_waits(name, None)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and not isinstance(each, DeviceTensor) and each.dim() > 0:
                raise AssertionError(
                    f"{name} mixes a tensor on the host, {list(each.shape)}, with the device"
                )
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        if device is not None:
            kwargs["device"] = "cpu"
        return self._launch(lambda *given: func(*given, **_on_host(kwargs)), args, written, kwargs)

    def launch_kernel(self, name: str, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a Triton kernel's wrapper in the interpreter, or what stands in for it."""
        given = tree_leaves((_unpacked(args), _unpacked(kwargs)))
        for each in given:
            if isinstance(each, Tensor) and not isinstance(each, DeviceTensor):
                raise AssertionError(f"{name} got a tensor on the host, {list(each.shape)}")
        written = [each for each in given if isinstance(each, DeviceTensor)] if name in _WRITERS else []
        self.num_launches += self.recording is None
        return self._launch(lambda *own: kernel(*own, **_on_host(kwargs)), args, written, kwargs)

    def _launch(self, call: Callable[..., Any], args: Any, written: list[Any], kwargs: Any) -> Any:
        """Run a call on the current stream, or record it."""
        self.stream.time += 1
        read = _device_tensors((args, kwargs))
        overwritten = _device_tensors(written)
        own = _on_host(args)
        addresses = {each.untyped_storage().data_ptr() for each in read}
        if self.recording is None:
            self.note_use(read, overwritten)
            return tree_map(lambda each: self._wrap(each, addresses), call(*own))
        saved = [each.clone() for each in overwritten]
        found = call(*own)
        for each, held in zip(overwritten, saved, strict=True):
            each.copy_(held)  # a recording executes nothing
        results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        # Kernels that follow get plausible numbers, without which the interpreter fails; garbage replaces them later.
        self.recording.allocated += [
            each for each in results if each.untyped_storage().data_ptr() not in addresses and each.numel()
        ]
        self.recording.calls.append(Call(lambda: call(*own), read, overwritten, results))
        return tree_map(lambda each: self._wrap(each, addresses), found)

    def note_use(self, read: list[Tensor], written: list[Tensor]) -> None:
        """Check the use of tensors on the current stream, and note it."""
        for each in read:
            self._check_read(each, self.stream)
        for each in written:
            self._note_write(each, self.stream)

    def _wrap(self, each: Any, addresses: set[int]) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, DeviceTensor):
            return each
        storage = each.untyped_storage()
        if storage.data_ptr() not in addresses:
            if self.recording is None:
                self._note_write(each, self.stream, is_new=True)
            else:
                self._writes.pop(storage.data_ptr(), None)
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._free, storage.nbytes())
        return DeviceTensor(each)

    def _free(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def _check_read(self, host: Tensor, stream: Stream) -> None:
        address = host.untyped_storage().data_ptr()
        writer, time = self._writes.get(address, (stream, 0))
        if writer is not stream and stream.seen.get(writer, 0) < time:
            raise StreamError(
                f"a tensor of shape {list(host.shape)} is read before the stream that wrote it ends"
            )
        self._reads.setdefault(address, {})[stream] = stream.time

    def _note_write(self, host: Tensor, stream: Stream, is_new: bool = False) -> None:
        address = host.untyped_storage().data_ptr()
        if not is_new:
            for reader, time in self._reads.get(address, {}).items():
                if reader is not stream and stream.seen.get(reader, 0) < time:
                    raise StreamError(
                        f"a tensor of {list(host.shape)} is written while another stream reads it"
                    )
        self._writes[address] = stream, stream.time
        self._reads[address] = {stream: stream.time}

    def _copy_to_host(self, source: DeviceTensor, kwargs: Any) -> Tensor:
        if kwargs.get("non_blocking"):
            raise HostWaitError("a copy to memory that is not pinned; copy to a pinned tensor instead")
        self._check_read(source.host, self.stream)
        self.host_waits("to_host", None)
        return source.host.to(kwargs.get("dtype") or source.dtype, copy=True)

    def _copy_to_device(self, source: Tensor, kwargs: Any) -> Any:
        self._before_copy(source, bool(kwargs.get("non_blocking")))
        self.stream.time += 1
        return self._wrap(source.to(kwargs.get("dtype") or source.dtype, copy=True), set())

    def _copy_between(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stream = self.stream
        stream.time += 1
        if isinstance(target, DeviceTensor):
            self._before_copy(source, non_blocking)
            self._note_write(target.host, stream)
            target.host.copy_(source)
            return target
        assert isinstance(source, DeviceTensor)
        self._check_read(source.host, stream)
        if not non_blocking:
            self.host_waits("to_host", None)
            target.copy_(source.host)
        elif not self.is_pinned(target):
            raise HostWaitError("a copy to memory that is not pinned makes the host wait")
        else:
            held = source.host.clone()
            target.fill_(GARBAGE)
            self._pending.append((stream, stream.time, lambda: _copy(target, held)))
        return target

    def _before_copy(self, source: Tensor, non_blocking: bool) -> None:
        if source.dim() == 0 or source.numel() == 0:
            return
        self._run_pending(self.stream.seen | {self.stream: self.stream.time})
        if not self.is_pinned(source):
            self.host_waits("to_device", None)
        elif non_blocking:
            self._sources.append((source, source.clone()))


class _DeviceMode(TorchDispatchMode):
    """Makes new tensors of the device, and pinned memory; ops on its tensors come to DeviceTensor."""

    def __init__(self, gpu: StandInGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if name == "_pin_memory":
            return self._gpu.pin(args[0])
        if name == "is_pinned":
            return self._gpu.is_pinned(args[0])
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        if on_device or any(isinstance(each, DeviceTensor) for each in tree_leaves((args, kwargs))):
            return self._gpu.run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return self._gpu.pin(func(*args, **kwargs | {"pin_memory": False}))
        return func(*args, **kwargs)


@contextmanager
def installed(
    monkeypatch: pytest.MonkeyPatch,
    gpu: StandInGpu | None = None,
    stand_in: Callable[[str, str], Callable[..., Any]] | None = None,
) -> Iterator[StandInGpu]:
    """Install the device for the body, on this thread.

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
        patch.setattr(StandInGpu, "current", device)
        with _DeviceMode(device):
            yield device
        gc.collect()  # pinned memory is unregistered while there is a device


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
        "cudart": lambda: _Cudart(gpu),
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
    patch.setattr(Tensor, "pin_memory", lambda tensor: gpu.pin(tensor))


class _Cudart:
    def __init__(self, gpu: StandInGpu) -> None:
        self._gpu = gpu

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self._gpu.pinned_addresses.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._gpu.pinned_addresses.discard(address)
        return 0


def _use_guard_of_meta() -> None:
    """Let C++ guards of CUDA devices do nothing, as those of meta tensors; a build without CUDA has none."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[_CUDA]:
        guards[_CUDA] = guards[_META]


def _gpu() -> StandInGpu:
    assert StandInGpu.current is not None
    return StandInGpu.current


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _has_mask(args: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2]))


def _device_tensors(tree: Any) -> list[Tensor]:
    """Return the CPU tensors of all device tensors of a tree."""
    return [each.host for each in tree_leaves(_unpacked(tree)) if isinstance(each, DeviceTensor)]


def _unpacked(value: Any) -> Any:
    """Return a tree in which dataclasses are dicts."""
    if isinstance(value, (list, tuple)):
        return [_unpacked(each) for each in value]
    if isinstance(value, dict):
        return {key: _unpacked(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _unpacked(getattr(value, each.name)) for each in fields(value)}
    return value


def _on_host(value: Any) -> Any:
    """Return the same tree with the CPU tensors of device tensors."""
    if isinstance(value, DeviceTensor):
        return value.host
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_on_host(each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(each) for each in value)
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: _on_host(getattr(value, each.name)) for each in fields(value) if each.init}
        )
    return value
