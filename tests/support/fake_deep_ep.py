"""A stand-in for DeepEP: `Buffer` with the signatures of DeepEP 2.1, over the ranks' own group.

Recorded from deep_ep/buffers/legacy.py at commit dd758ca of github.com/deepseek-ai/DeepEP, which states the shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Rows that a rank sends to each: what DeepEP calls a handle begins with it.
Counts = list[list[int]]


class EventOverlap:
    """The event of a kernel on a stream."""

    def current_stream_wait(self) -> None:
        pass


class Buffer:
    """DeepEP's buffer. `comm` is the part of an MPI communicator that DeepEP uses."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert group is None
        self.rank, self.group_size = comm.Get_rank(), comm.Get_size()
        self.low_latency_mode = low_latency_mode
        assert comm.allgather(self.rank) == list(range(self.group_size))
        handles = comm.allgather(bytearray([self.rank] * (1 + self.rank)))
        assert handles == [bytearray([rank] * (1 + rank)) for rank in range(self.group_size)]
        assert comm.allgather(b"id" if self.rank == 0 else None)[0] == b"id"
        self._comm = comm._comm

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 2 * num_max_dispatch_tokens_per_rank * hidden * num_experts

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        ranks = topk_idx // (num_experts // self.group_size)
        in_rank = torch.zeros(len(topk_idx), self.group_size, dtype=torch.bool).scatter_(1, ranks, True)
        of_expert = topk_idx.flatten().bincount(minlength=num_experts).int()
        return in_rank.sum(dim=0).int(), None, of_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, list[int], Any, EventOverlap]:
        assert handle is None
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        counts: Counts = self._comm.all_gather(num_tokens_per_rank).tolist()
        tokens = is_token_in_rank.t().nonzero()[:, 1]
        received, indices, weights = (
            self._comm.all_to_all(rows[tokens], counts).wait() for rows in (x, topk_idx, topk_weights)
        )
        own = len(num_tokens_per_expert) // self.group_size
        indices = indices - self.rank * own
        is_own = (indices >= 0) & (indices < own)
        num_received = indices[is_own].bincount(minlength=own).tolist()
        handle = counts, tokens, len(x)
        return (
            received,
            indices.where(is_own, -1),
            weights.where(is_own, torch.zeros(())),
            num_received,
            handle,
            EventOverlap(),
        )

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        counts, tokens, num_tokens = handle
        back = self._comm.all_to_all(x, [list(own) for own in zip(*counts, strict=True)]).wait()
        return x.new_zeros(num_tokens, x.shape[1]).index_add_(0, tokens, back), None, EventOverlap()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor, Tensor, Any, EventOverlap, Callable[[], None]]:
        assert self.low_latency_mode
        assert not use_fp8
        assert return_recv_hook
        assert len(x) <= num_max_dispatch_tokens_per_rank
        own = num_experts // self.group_size
        # By expert, so by rank.
        experts, order = topk_idx.flatten().sort(stable=True)
        counts: Counts = self._comm.all_gather((experts // own).bincount(minlength=self.group_size)).tolist()
        rows = self._comm.all_to_all(x[order // topk_idx.shape[1]], counts).wait()
        received = self._comm.all_to_all(experts, counts).wait() - self.rank * own
        # What is not taken is garbage.
        places = x.new_full((own, num_max_dispatch_tokens_per_rank * self.group_size, x.shape[1]), torch.nan)
        of_expert = [(received == expert).nonzero().flatten() for expert in range(own)]

        def arrive() -> None:
            for expert, index in enumerate(of_expert):
                places[expert, : len(index)] = rows[index]

        handle = counts, of_expert, order, topk_idx
        return places, torch.tensor([len(index) for index in of_expert]).int(), handle, EventOverlap(), arrive

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        counts, of_expert, order, dispatched = handle
        assert torch.equal(dispatched, topk_idx)
        rows = x.new_empty(sum(map(len, of_expert)), x.shape[2])
        for expert, index in enumerate(of_expert):
            rows[index] = x[expert, : len(index)]
        back = self._comm.all_to_all(rows, [list(own) for own in zip(*counts, strict=True)]).wait()
        terms = torch.empty_like(back)
        terms[order] = back
        summed = (terms.view(*topk_idx.shape, x.shape[2]) * topk_weights.unsqueeze(2)).sum(dim=1)
        return summed.to(x.dtype), EventOverlap(), lambda: None
