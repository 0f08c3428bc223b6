"""DeepEpExchange: dispatch and combine by the library DeepEP, over NVLink and RDMA.

The calls are those of `deep_ep.Buffer` in DeepEP 2.1 (github.com/deepseek-ai/DeepEP, deep_ep/buffers/legacy.py). Not
yet run on a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgpack
import torch
from torch import Tensor

from ...proto.errors import ConfigError
from ...proto.model.parallel_split import own_indices
from .communicator import Communicator
from .expert_exchange import Dispatched, ExpertExchange, Flight, Owners

# Of its buffer for GPUs of one node, and for those of others: what DeepEP's own tests take.
_NVLINK_BYTES = 1 << 30
_RDMA_BYTES = 1 << 30
_GPUS_OF_A_NODE = 8


class DeepEpGroup:
    """The part of an MPI communicator that `deep_ep.Buffer` uses, over a group of quire's."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def Get_rank(self) -> int:
        return self._comm.rank

    def Get_size(self) -> int:
        return self._comm.size

    def allgather(self, value: int | bytes | bytearray | None) -> list[Any]:
        """Return the values of all ranks, by rank; bytes are bytearrays, as the library gives them."""
        own = bytearray(msgpack.packb(bytes(value) if isinstance(value, bytearray) else value))
        data = torch.frombuffer(own, dtype=torch.uint8).to(self._device)
        lens = self._comm.all_gather(torch.tensor([len(data)], device=self._device)).flatten().tolist()
        padded = data.new_zeros(max(lens))
        padded[: len(data)] = data
        gathered = self._comm.all_gather(padded).cpu()
        values = [
            msgpack.unpackb(row[:length].numpy().tobytes())
            for row, length in zip(gathered, lens, strict=True)
        ]
        return [bytearray(each) if isinstance(each, bytes) else each for each in values]


class DeepEpExchange(Owners):
    """ExpertExchange for many tokens (DeepEP's normal kernels); the host waits for the numbers of tokens."""

    reads_back = True

    def __init__(
        self, comm: Communicator, buffer: Any, num_slots: int, attention: Communicator | None
    ) -> None:
        super().__init__(comm, attention)
        self._buffer, self._num_slots = buffer, num_slots
        self._own = own_indices(comm.rank, comm.size, num_slots)

    def dispatch(self, tokens: Dispatched) -> Flight:
        x, factors, slot_ids, _ = tokens  # adapters are refused
        of_rank, of_node, of_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            slot_ids, self._num_slots
        )
        received, slots, own_factors, _, handle, event = self._buffer.dispatch(
            x,
            topk_idx=slot_ids,
            topk_weights=factors,
            num_tokens_per_rank=of_rank,
            num_tokens_per_rdma_rank=of_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=of_expert,
            async_finish=True,
        )
        # The library numbers this rank's experts from 0; -1 is one of another rank.
        elsewhere = self._own.stop % self._num_slots
        slot_ids = (slots + self._own.start).where(slots >= 0, elsewhere)
        return _DeepEpFlight(self._buffer, Dispatched(received, own_factors, slot_ids), handle, event)


class _DeepEpFlight:
    def __init__(self, buffer: Any, received: Dispatched, handle: Any, event: Any) -> None:
        self._buffer, self._received, self._handle, self._event = buffer, received, handle, event

    def wait(self) -> Dispatched:
        self._event.current_stream_wait()
        return self._received

    def combine(self, part: Tensor) -> Tensor:
        out: Tensor = self._buffer.combine(part, self._handle)[0]
        return out


class DeepEpLowLatency(Owners):
    """ExpertExchange for few tokens: places for `max_tokens` of each rank, so that a step can be recorded as a graph.

    Args:
        max_tokens: most tokens that a rank dispatches.
    """

    reads_back = False

    def __init__(
        self,
        comm: Communicator,
        buffer: Any,
        num_slots: int,
        attention: Communicator | None,
        max_tokens: int,
    ) -> None:
        super().__init__(comm, attention)
        self._buffer, self._num_slots, self._max_tokens = buffer, num_slots, max_tokens
        self._own = own_indices(comm.rank, comm.size, num_slots)

    def dispatch(self, tokens: Dispatched) -> Flight:
        x, factors, slot_ids, _ = tokens
        received, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            x, slot_ids, self._max_tokens, self._num_slots, use_fp8=False, return_recv_hook=True
        )
        return _LowLatencyFlight(
            self._buffer, self._own, self._num_slots, (factors, slot_ids), received, counts, handle, hook
        )


class _LowLatencyFlight:
    """Tokens in the places of each expert, [X, P, E], of which the first ones are taken.

    Args:
        choices: factors and slots of the own tokens.
        counts: [X], places that are taken.
    """

    def __init__(
        self,
        buffer: Any,
        own: range,
        num_slots: int,
        choices: tuple[Tensor, Tensor],
        received: Tensor,
        counts: Tensor,
        handle: Any,
        hook: Any,
    ) -> None:
        self._buffer, self._own, self._elsewhere = buffer, own, own.stop % num_slots
        self._choices, self._received, self._counts = choices, received, counts
        self._handle, self._hook = handle, hook

    def wait(self) -> Dispatched:
        self._hook()
        num_experts, num_places, _ = self._received.shape
        places = torch.arange(num_places, device=self._counts.device)
        slots = torch.arange(self._own.start, self._own.stop, device=self._counts.device).unsqueeze(1)
        slot_ids = slots.where(places < self._counts.unsqueeze(1), self._elsewhere)
        factors = torch.ones(num_experts * num_places, 1, device=self._counts.device)
        return Dispatched(self._received.flatten(0, 1), factors, slot_ids.view(-1, 1))

    def combine(self, part: Tensor) -> Tensor:
        factors, slot_ids = self._choices
        out: Tensor = self._buffer.low_latency_combine(
            part.view(self._received.shape), slot_ids, factors, self._handle
        )[0]
        return out


def open_deep_ep(
    comm: Communicator,
    backend: str,
    num_slots: int,
    hidden_size: int,
    max_tokens: int,
    device: torch.device,
    attention: Communicator | None,
) -> ExpertExchange:
    """Open DeepEP's buffer on all ranks together.

    Args:
        backend: ``deepep_high_throughput`` or ``deepep_low_latency``.
        max_tokens: most tokens that a rank dispatches in a step.
        attention: as for Owners.

    Raises:
        ConfigError: the library is not installed, or does not fit.
    """
    try:
        library = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            f"all2all_backend is {backend}, but DeepEP cannot be imported: {error}; install deep_ep, or set "
            "all2all_backend to all_to_all"
        ) from error
    if num_slots % comm.size:
        raise ConfigError(
            f"all2all_backend is {backend}, for which each rank has as many experts, but {comm.size} ranks do not "
            f"divide {num_slots}; set num_redundant_experts to {-num_slots % comm.size} more, or all2all_backend to "
            "all_to_all"
        )
    group = DeepEpGroup(comm, device)
    if backend == "deepep_high_throughput":
        rdma_bytes = _RDMA_BYTES if comm.size > _GPUS_OF_A_NODE else 0
        buffer = library.Buffer(None, _NVLINK_BYTES, rdma_bytes, comm=group)
        return DeepEpExchange(comm, buffer, num_slots, attention)
    num_bytes = library.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden_size, comm.size, num_slots)
    buffer = library.Buffer(
        None, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=num_slots // comm.size, comm=group
    )
    return DeepEpLowLatency(comm, buffer, num_slots, attention, max_tokens)
