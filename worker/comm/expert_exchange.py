"""ExpertExchange: the way of a mixture's tokens to the ranks that hold their experts, and of the results back.

Experts are in numbered slots; a rank has adjacent ones. There are three ways:

- `SumOfRanks`: every rank has all tokens, computes those that chose its experts, and an all-reduce adds the results.
- `AllToAll`: each token has an owner, which sends it once to each rank that has some of its experts (dispatch), and
  adds up what comes back (combine).
- `DeepEpExchange` (deep_ep.py): the same by the library DeepEP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...proto.model.parallel_split import own_indices
from .communicator import Arrival, Communicator, RowCounts


class Dispatched(NamedTuple):
    """Tokens that a rank computes its experts for.

    Attributes:
        x: [R, E].
        factors: [R, K] float32, of each token's experts.
        slot_ids: [R, K] int64, of the experts, which may be those of other ranks.
    """

    x: Tensor
    factors: Tensor
    slot_ids: Tensor


class Flight(Protocol):
    """Tokens on their way; the caller may compute what needs none of them before it waits."""

    def wait(self) -> Dispatched:
        """Return the tokens that have come to this rank."""
        ...

    def combine(self, part: Tensor) -> Tensor:
        """Send results [R, E] back, the factors applied; return the sums of this rank's own tokens, [N, E].

        Each sum is in an order that does not depend on the other tokens.
        """
        ...


class ExpertExchange(Protocol):
    """Dispatch and combine of one rank.

    Attributes:
        owns_tokens: the tokens between a model's layers are those that this rank attends for (data-parallel
            attention), so that every other layer computes these alone, with its whole weights.
        is_whole: networks that every token passes are whole on each rank, which computes them for its own tokens;
            otherwise each rank computes an addend for all tokens.
        reads_back: the host reads numbers of tokens from the device, which a recording cannot do.
    """

    owns_tokens: bool
    is_whole: bool
    reads_back: bool

    def select(self, x: Tensor) -> Tensor:
        """Return the tokens that this rank dispatches, of those between the layers, [T, E] -> [N, E]."""
        ...

    def dispatch(self, x: Tensor, factors: Tensor, slot_ids: Tensor) -> Flight:
        """Send tokens to the ranks that have their experts; the arguments are as in Dispatched."""
        ...

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        """Return the results of all T = `num_tokens` tokens between the layers, [N, E] -> [T, E]."""
        ...


@dataclass(frozen=True, slots=True)
class _Present:
    """Tokens that are on every rank."""

    tokens: Dispatched

    def wait(self) -> Dispatched:
        return self.tokens

    def combine(self, part: Tensor) -> Tensor:
        return part


class SumOfRanks:
    """ExpertExchange without any: the addends of all ranks are summed after everything else."""

    owns_tokens = is_whole = reads_back = False

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def select(self, x: Tensor) -> Tensor:
        return x

    def dispatch(self, x: Tensor, factors: Tensor, slot_ids: Tensor) -> Flight:
        return _Present(Dispatched(x, factors, slot_ids))

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        return self._comm.all_reduce(part)


class Owners:
    """The owners of the tokens between layers: the ranks that attend for them, or each rank an even part of them."""

    def __init__(self, comm: Communicator, *, owns_tokens: bool) -> None:
        self._comm, self.owns_tokens = comm, owns_tokens
        self.is_whole = True

    def select(self, x: Tensor) -> Tensor:
        if self.owns_tokens:
            return x
        own = own_indices(self._comm.rank, self._comm.size, len(x))
        return x[own.start : own.stop]

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        comm = self._comm
        if self.owns_tokens or comm.size == 1:
            return part
        # The first ranks may have a token more: all send as many.
        most, num_longer = -(-num_tokens // comm.size), num_tokens % comm.size
        padded = part if len(part) == most else torch.cat((part, part.new_zeros(1, part.shape[1])))
        gathered = comm.all_gather(padded)
        if not num_longer:
            return gathered.flatten(0, 1)
        return torch.cat((gathered[:num_longer].flatten(0, 1), gathered[num_longer:, :-1].flatten(0, 1)))


class AllToAll(Owners):
    """Dispatch and combine by the group's all-to-all: shared memory on one host, gloo over hosts, NCCL on GPUs.

    Args:
        num_slots: of all ranks.
        owns_tokens: as in ExpertExchange.
        by_choice: results come back one for each choice, and the owner adds them up in the order of a token's
            choices: the sum has the same bits wherever the experts are. Otherwise each rank adds up its own first,
            which sends less.

    Attributes:
        num_sent_bytes: what this rank has sent to others.
    """

    reads_back = True

    def __init__(self, comm: Communicator, num_slots: int, *, owns_tokens: bool, by_choice: bool) -> None:
        super().__init__(comm, owns_tokens=owns_tokens)
        self.comm, self.by_choice = comm, by_choice
        ranks = [rank for rank in range(comm.size) for _ in own_indices(rank, comm.size, num_slots)]
        self._rank_of_slot = torch.tensor(ranks)
        self.num_sent_bytes = 0

    def dispatch(self, x: Tensor, factors: Tensor, slot_ids: Tensor) -> Flight:
        if self._rank_of_slot.device != x.device:
            self._rank_of_slot = self._rank_of_slot.to(x.device)
        ranks = self._rank_of_slot[slot_ids]  # [N, K]
        goes_to = torch.zeros(len(x), self.comm.size, dtype=torch.bool, device=x.device)
        goes_to.scatter_(1, ranks, value=True)
        rank_tokens = goes_to.t().nonzero()  # by rank, and by token for each
        num_choices = torch.bincount(ranks.flatten(), minlength=self.comm.size)
        counts = self.comm.all_gather(torch.stack((goes_to.sum(dim=0), num_choices))).tolist()
        of_tokens, of_choices = ([own[kind] for own in counts] for kind in range(2))
        tokens = rank_tokens[:, 1]
        rows = _pack(x[tokens], factors[tokens], slot_ids[tokens])
        arrival = self.send(rows, of_tokens)
        return _AllToAllFlight(self, x, ranks, tokens, of_tokens, of_choices, arrival)

    def send(self, rows: Tensor, counts: RowCounts) -> Arrival:
        """Begin an all-to-all, and count what it sends."""
        own = self.comm.rank
        num_rows = sum(counts[own]) - counts[own][own]
        self.num_sent_bytes += num_rows * rows.shape[1] * rows.element_size()
        return self.comm.all_to_all(rows, counts)

    def is_own(self, slot_ids: Tensor) -> Tensor:
        """Return which of the slots are this rank's."""
        return self._rank_of_slot[slot_ids] == self.comm.rank


class _AllToAllFlight:
    """Tokens that `AllToAll` has sent.

    Args:
        x: the own tokens, [N, E].
        ranks: [N, K], of the experts of each.
        tokens: the own token of each row that was sent.
        of_tokens, of_choices: tokens and choices that each rank has sent to each.
    """

    def __init__(
        self,
        exchange: AllToAll,
        x: Tensor,
        ranks: Tensor,
        tokens: Tensor,
        of_tokens: RowCounts,
        of_choices: RowCounts,
        arrival: Arrival,
    ) -> None:
        self._exchange, self._arrival = exchange, arrival
        self._x, self._ranks, self._tokens = x, ranks, tokens
        self._of_tokens, self._of_choices = of_tokens, of_choices

    def wait(self) -> Dispatched:
        received = _unpack(self._arrival.wait(), self._x, self._ranks.shape[1])
        if not self._exchange.by_choice:
            return received
        row, choice = self._exchange.is_own(received.slot_ids).nonzero().unbind(1)
        factors, slots = received.factors[row, choice], received.slot_ids[row, choice]
        return Dispatched(received.x[row], factors.unsqueeze(1), slots.unsqueeze(1))

    def combine(self, part: Tensor) -> Tensor:
        exchange = self._exchange
        counts = self._of_choices if exchange.by_choice else self._of_tokens
        back = exchange.send(part, [list(own) for own in zip(*counts, strict=True)]).wait()
        return self._sum_choices(back) if exchange.by_choice else self._sum_ranks(back)

    def _sum_choices(self, back: Tensor) -> Tensor:
        num_tokens, top_k = self._ranks.shape
        # Rows come by rank, then by token and choice.
        order = self._ranks.flatten().argsort(stable=True)
        terms = torch.empty(num_tokens * top_k, back.shape[1], dtype=torch.float32, device=back.device)
        terms[order] = back.float()
        terms = terms.view(num_tokens, top_k, back.shape[1])
        total = terms[:, 0].clone()
        for choice in range(1, top_k):
            total += terms[:, choice]
        return total.to(back.dtype)

    def _sum_ranks(self, back: Tensor) -> Tensor:
        sent = self._of_tokens[self._exchange.comm.rank]
        total = torch.zeros(len(self._x), back.shape[1], dtype=torch.float32, device=back.device)
        # One rank after the other: a token has at most one row of each.
        for tokens, rows in zip(self._tokens.split(list(sent)), back.split(list(sent)), strict=True):
            total.index_add_(0, tokens, rows.float())
        return total.to(back.dtype)


def _pack(x: Tensor, factors: Tensor, slot_ids: Tensor) -> Tensor:
    """Return one row of bytes for each token, so that a dispatch is one message."""
    parts: Sequence[Tensor] = (x, factors.float(), slot_ids.int())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(rows: Tensor, like: Tensor, top_k: int) -> Dispatched:
    width = like.shape[1] * like.element_size()
    x, factors, slots = rows.split([width, 4 * top_k, 4 * top_k], dim=1)
    return Dispatched(
        x.contiguous().view(like.dtype),
        factors.contiguous().view(torch.float32),
        slots.contiguous().view(torch.int32).long(),
    )
