"""StandInGpu: runs ops and kernels on device tensors, or records them."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .device_tensor import DeviceTensor, find_device_tensors, find_host_tensors, host_parts, on_host
from .graphs import Graph
from .streams import MemoryOrder, Stream
from .transfers import HostWaitError, Transfers

_READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")
# Kernels that write to some of their arguments.
_WRITERS = (
    "fused_qk_norm_rope_kv_write",
    "fused_latent_norm_rope_write",
    "add_rms_norm",
    "add_rms_norm_float8",
    "add_lora",
    "copy_blocks",
    "update_block_tables",
    "all_reduce_add_rms_norm",
)


class StandInGpu:
    """The device; `installed` puts it in place of torch's CUDA.

    Attributes:
        num_syncs: how often the host waited, by cause.
        num_launches, num_replays: kernels launched outside recordings, and replays.
        allocated: bytes of device memory, and their peak.
    """

    def __init__(self, total_memory: int = 1 << 30) -> None:
        self.total_memory = total_memory
        self.default_stream = Stream()
        self.num_syncs: dict[str, int] = defaultdict(int)
        self.num_launches = self.num_replays = 0
        self.allocated = self.peak = 0
        self.recording: Graph | None = None
        self.transfers = Transfers()
        self._order = MemoryOrder()
        self._streams = threading.local()

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
                graph.end()

    def host_waits(self, cause: str, until: dict[Stream, int] | None) -> None:
        """Let the host wait until streams have reached a time; None: all of them, now."""
        if self.recording is not None:
            raise HostWaitError(f"{cause} waits for the device while a graph is recorded")
        self.num_syncs[cause] += 1
        self.transfers.check_sources()
        self.transfers.run_pending(until)

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
        return self._launch(lambda *given: func(*given, **on_host(kwargs)), args, written, kwargs)

    def launch_kernel(self, name: str, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a Triton kernel's wrapper in the interpreter, or what stands in for it."""
        if name == "copy_scattered_blocks":
            return self._copy_blocks(*args)
        for each in find_host_tensors((args, kwargs)):
            raise AssertionError(f"{name} got a tensor on the host, {list(each.shape)}")
        written = find_device_tensors((args, kwargs)) if name in _WRITERS else []
        self.num_launches += self.recording is None
        return self._launch(lambda *own: kernel(*own, **on_host(kwargs)), args, written, kwargs)

    def _copy_blocks(self, pairs: Tensor, source: Tensor, destination: Tensor) -> None:
        """Copy blocks between the device and pinned host memory, as the copies of single blocks are."""
        (host,) = find_host_tensors((pairs, source, destination))
        assert self.transfers.is_pinned(host), "copy_scattered_blocks got host memory that is not pinned"
        for source_id, destination_id in on_host((pairs,))[0].tolist():
            destination[:, destination_id].copy_(source[:, source_id], non_blocking=True)

    def note_use(self, read: list[Tensor], written: list[Tensor]) -> None:
        """Check the use of tensors on the current stream, and note it."""
        for each in read:
            self._order.note_read(each, self.stream)
        for each in written:
            self._order.note_write(each, self.stream)

    def _launch(self, call: Callable[..., Any], args: Any, written: list[Any], kwargs: Any) -> Any:
        """Run a call on the current stream, or record it."""
        self.stream.time += 1
        read, overwritten, own = host_parts((args, kwargs)), host_parts(written), on_host(args)
        addresses = {each.untyped_storage().data_ptr() for each in read}
        if self.recording is None:
            self.note_use(read, overwritten)
            found = call(*own)
        else:
            found = self.recording.add(lambda: call(*own), read, overwritten)
        return tree_map(lambda each: self._wrap(each, addresses), found)

    def _wrap(self, each: Any, addresses: set[int]) -> Any:
        """Put a tensor on the device, if it is one; its storage is new unless its address is among `addresses`."""
        if not isinstance(each, Tensor) or isinstance(each, DeviceTensor):
            return each
        storage = each.untyped_storage()
        if storage.data_ptr() not in addresses:
            if self.recording is None:
                self._order.note_new(each, self.stream)
            else:
                self._order.forget_writer(each)
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._free, storage.nbytes())
        return DeviceTensor(each)

    def _free(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def _copy_to_host(self, source: DeviceTensor, kwargs: Any) -> Tensor:
        if kwargs.get("non_blocking"):
            raise HostWaitError("a copy to memory that is not pinned; copy to a pinned tensor instead")
        self._order.note_read(source.host, self.stream)
        self.host_waits("to_host", None)
        return source.host.to(kwargs.get("dtype") or source.dtype, copy=True)

    def _copy_to_device(self, source: Tensor, kwargs: Any) -> Any:
        self._send(source, bool(kwargs.get("non_blocking")))
        self.stream.time += 1
        return self._wrap(source.to(kwargs.get("dtype") or source.dtype, copy=True), set())

    def _copy_between(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        self.stream.time += 1
        if isinstance(target, DeviceTensor):
            self._send(source, non_blocking)
            self._order.note_write(target.host, self.stream)
            target.host.copy_(source)
            return target
        assert isinstance(source, DeviceTensor)
        self._order.note_read(source.host, self.stream)
        if non_blocking:
            self.transfers.fetch_later(target, source.host, self.stream)
        else:
            self.host_waits("to_host", None)
            target.copy_(source.host)
        return target

    def _send(self, source: Tensor, non_blocking: bool) -> None:
        if self.transfers.send(source, self.stream, non_blocking=non_blocking):
            self.host_waits("to_device", None)


def _has_mask(args: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1:2]))
