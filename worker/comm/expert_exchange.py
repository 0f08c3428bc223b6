"""ExpertExchange: the way of a mixture's tokens to the ranks that hold their experts, and of the results back.

Experts are in numbered slots; a rank has adjacent ones. There are three ways:

- `SumOfRanks`: every rank has all tokens, computes those that chose its experts, and an all-reduce adds the results.
- `AllToAll`: each token has an owner, which sends it once to each rank that has some of its experts (dispatch), and
  adds up what comes back (combine).
- `DeepEpExchange` (deep_ep.py): the same by the library DeepEP.
"""

from __future__ import annotations

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
        adapters: [R] int32, the slot of each token's LoRA adapter, see StepAdapters; None without any.
    """

    x: Tensor
    factors: Tensor
    slot_ids: Tensor
    adapters: Tensor | None = None


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
            attention), so that every other layer computes these alone, with weights that the ranks that attend for
            the same tokens share.
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

    def dispatch(self, tokens: Dispatched) -> Flight:
        """Send tokens to the ranks that have their experts. All ranks give adapters in a step, or none does."""
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

    def dispatch(self, tokens: Dispatched) -> Flight:
        return _Present(tokens)

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        return self._comm.all_reduce(part)


class Owners:
    """The owners of the tokens between layers: of those that several ranks have, each owns an even part.

    Args:
        comm: all ranks.
        attention: with data-parallel attention the ranks that attend for the same tokens; None without, where all do.
    """

    is_whole = True

    def __init__(self, comm: Communicator, attention: Communicator | None) -> None:
        self.owns_tokens = attention is not None
        self._sharers = comm if attention is None else attention

    def select(self, x: Tensor) -> Tensor:
        own = own_indices(self._sharers.rank, self._sharers.size, len(x))
        return x[own.start : own.stop]

    def gather(self, part: Tensor, num_tokens: int) -> Tensor:
        comm = self._sharers
        if comm.size == 1 or num_tokens == 0:
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
        attention: as for Owners.
        by_choice: results come back one for each choice, and the owner adds them up in the order of a token's
            choices: the sum has the same bits wherever the experts are. Otherwise each rank adds up its own first,
            which sends less.

    Attributes:
        num_sent_bytes: what this rank has sent to others.
    """

    reads_back = True

    def __init__(
        self, comm: Communicator, num_slots: int, attention: Communicator | None, *, by_choice: bool
    ) -> None:
        super().__init__(comm, attention)
        self.comm, self.by_choice = comm, by_choice
        ranks = [rank for rank in range(comm.size) for _ in own_indices(rank, comm.size, num_slots)]
        self._rank_of_slot = torch.tensor(ranks)
        self.num_sent_bytes = 0

    def dispatch(self, tokens: Dispatched) -> Flight:
        x, slot_ids = tokens.x, tokens.slot_ids
        if self._rank_of_slot.device != x.device:
            self._rank_of_slot = self._rank_of_slot.to(x.device)
        ranks = self._rank_of_slot[slot_ids]  # [N, K]
        goes_to = torch.zeros(len(x), self.comm.size, dtype=torch.bool, device=x.device)
        goes_to.scatter_(1, ranks, value=True)
        rank_tokens = goes_to.t().nonzero()  # by rank, and by token for each
        num_choices = torch.bincount(ranks.flatten(), minlength=self.comm.size)
        counts = self.comm.all_gather(torch.stack((goes_to.sum(dim=0), num_choices))).tolist()
        of_tokens, of_choices = ([own[kind] for own in counts] for kind in range(2))
        index = rank_tokens[:, 1]
        arrival = self.send(_pack(tokens, index), of_tokens)
        return _AllToAllFlight(self, tokens, ranks, index, of_tokens, of_choices, arrival)

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
        own: the N own tokens.
        ranks: [N, K], of the experts of each.
        index: the own token of each row that was sent.
        of_tokens, of_choices: tokens and choices that each rank has sent to each.
    """

    def __init__(
        self,
        exchange: AllToAll,
        own: Dispatched,
        ranks: Tensor,
        index: Tensor,
        of_tokens: RowCounts,
        of_choices: RowCounts,
        arrival: Arrival,
    ) -> None:
        self._exchange, self._arrival = exchange, arrival
        self._own, self._ranks, self._index = own, ranks, index
        self._of_tokens, self._of_choices = of_tokens, of_choices

    def wait(self) -> Dispatched:
        received = _unpack(self._arrival.wait(), self._own)
        if not self._exchange.by_choice:
            return received
        row, choice = self._exchange.is_own(received.slot_ids).nonzero().unbind(1)
        factors, slots = received.factors[row, choice], received.slot_ids[row, choice]
        adapters = None if received.adapters is None else received.adapters[row]
        return Dispatched(received.x[row], factors.unsqueeze(1), slots.unsqueeze(1), adapters)

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
        total = torch.zeros(len(self._own.x), back.shape[1], dtype=torch.float32, device=back.device)
        # One rank after the other: a token has at most one row of each.
        for tokens, rows in zip(self._index.split(list(sent)), back.split(list(sent)), strict=True):
            total.index_add_(0, tokens, rows.float())
        return total.to(back.dtype)


def _pack(tokens: Dispatched, index: Tensor) -> Tensor:
    """Return one row of bytes for each of some tokens, so that a dispatch is one message."""
    adapters = [] if tokens.adapters is None else [tokens.adapters[index].int().unsqueeze(1)]
    parts = tokens.x[index], tokens.factors[index].float(), tokens.slot_ids[index].int(), *adapters
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(rows: Tensor, like: Dispatched) -> Dispatched:
    top_k, width = like.slot_ids.shape[1], like.x.shape[1] * like.x.element_size()
    of_adapters = [] if like.adapters is None else [4]
    x, factors, slots, *adapters = rows.split([width, 4 * top_k, 4 * top_k, *of_adapters], dim=1)
    return Dispatched(
        x.contiguous().view(like.x.dtype),
        factors.contiguous().view(torch.float32),
        slots.contiguous().view(torch.int32).long(),
        adapters[0].contiguous().view(torch.int32).flatten() if adapters else None,
    )
