"""Pipeline: the groups of one rank of a replica, and its links to the neighboring pipeline stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...proto.model.parallel_split import WHOLE_MODEL, ParallelSplit, Stage
from .communicator import Communicator, ReplaceableGroup, SingleRank, nothing
from .torch_distributed import TorchDistributed, Transfer

# Sends of a kind that may be unfinished. The receiver of hidden states takes them as fast as it computes, that of
# tokens before it sends the hidden states that they are sampled from.
_MAX_UNFINISHED = 8
# Transfers of a kind have tags of their own, in turns, so that no two in flight are taken for each other.
_NUM_TAGS = 64
_STATES, _TOKENS = 0, 1


class TokenArrival(Protocol):
    """Sampled tokens that are on their way to the first stage."""

    def wait(self) -> Tensor:
        """Return the tokens, [N] int32. Raises ConnectionError if they cannot come any more."""
        ...


class StageLink(Protocol):
    """The transfers of a rank with the ranks of the same number in other pipeline stages.

    Attributes:
        awaited: what the rank waits for now, for a status; empty if it waits for nothing.
    """

    awaited: str

    def take_waited_s(self) -> float:
        """Return the seconds that the rank has waited for other stages since the last call."""
        ...

    def send_states(self, states: Tensor) -> None:
        """Send hidden states, [T, E], to the next stage; nobody may write to them any more."""
        ...

    def receive_states(self, out: Tensor) -> Tensor:
        """Fill `out`, [T, E], with the hidden states of the previous stage, and return it."""
        ...

    def send_tokens(self, token_ids: Tensor) -> None:
        """Send sampled tokens, [N] int32, from the last stage to the first; nobody may write to them any more."""
        ...

    def receive_tokens(self, count: int) -> TokenArrival:
        """Begin to receive sampled tokens from the last stage."""
        ...

    def close(self) -> None:
        """Forget unfinished transfers, which would keep the connections of a group that is left."""
        ...


class NoLink:
    """The link of a replica's only stage."""

    awaited = ""

    def take_waited_s(self) -> float:
        return 0.0

    def send_states(self, states: Tensor) -> None:
        raise AssertionError("there is no next stage")

    def receive_states(self, out: Tensor) -> Tensor:
        raise AssertionError("there is no previous stage")

    def send_tokens(self, token_ids: Tensor) -> None:
        raise AssertionError("there is no first stage")

    def receive_tokens(self, count: int) -> TokenArrival:
        raise AssertionError("there is no last stage")

    def close(self) -> None:
        pass


NO_LINK = NoLink()


class GroupLink:
    """StageLink by sends and receives of the group of all ranks, and the arrival of tokens, which come in order.

    Args:
        group: of all ranks of the replica, over a TorchDistributed.
    """

    def __init__(self, group: ReplaceableGroup[TorchDistributed], split: ParallelSplit) -> None:
        self.awaited = ""
        self._group = group
        self._previous, self._next = group.rank - split.tensor, group.rank + split.tensor
        self._first = split.place_of(group.rank).tensor
        self._last = split.result_rank + self._first
        self._unfinished: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._arrivals: deque[Transfer] = deque()  # of tokens, the oldest first
        self._num_sent = [0, 0]
        self._num_received = [0, 0]
        self._waited_s = 0.0

    def take_waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def send_states(self, states: Tensor) -> None:
        self._send(_STATES, states, self._next)

    def receive_states(self, out: Tensor) -> Tensor:
        transfer = self._group.group.receive(out, self._previous, self._next_tag(_STATES, self._num_received))
        return self._wait(transfer, f"hidden states of rank {self._previous}")

    def send_tokens(self, token_ids: Tensor) -> None:
        self._send(_TOKENS, token_ids, self._first)

    def receive_tokens(self, count: int) -> TokenArrival:
        # Posted at once, so that the sender never waits. Kept here, so that `close` lets go of it.
        out = torch.empty(count, dtype=torch.int32)
        tag = self._next_tag(_TOKENS, self._num_received)
        self._arrivals.append(self._group.group.receive(out, self._last, tag))
        return self

    def wait(self) -> Tensor:
        """Return the tokens of the oldest step that are awaited."""
        if not self._arrivals:
            raise ConnectionError(f"rank {self._group.rank} has left the group")
        return self._wait(self._arrivals.popleft(), f"tokens of rank {self._last}")

    def close(self) -> None:
        for unfinished in (*self._unfinished, self._arrivals):
            unfinished.clear()
        self._num_sent, self._num_received = [0, 0], [0, 0]

    def _send(self, kind: int, tensor: Tensor, rank: int) -> None:
        unfinished = self._unfinished[kind]
        while len(unfinished) >= _MAX_UNFINISHED:
            self._wait(unfinished.popleft(), f"rank {rank} to take what was sent")
        tag = self._next_tag(kind, self._num_sent)
        unfinished.append(self._group.group.send(tensor.contiguous(), rank, tag))

    def _next_tag(self, kind: int, counts: list[int]) -> int:
        counts[kind] += 1
        return kind * _NUM_TAGS + counts[kind] % _NUM_TAGS

    def _wait(self, transfer: Transfer, awaited: str) -> Tensor:
        began_at, self.awaited = time.perf_counter(), awaited
        try:
            return transfer.wait()
        finally:
            self.awaited = ""
            self._waited_s += time.perf_counter() - began_at


class Pipeline:
    """The groups of one rank.

    Args:
        rank: of the replica.
        tensor: the ranks that share the layers of this rank's stage.
        replica: all ranks.
        link: to the other stages.

    Attributes:
        stage: the layers of this rank.
    """

    def __init__(
        self,
        stage: Stage,
        rank: int,
        tensor: Communicator,
        replica: Communicator,
        link: StageLink = NO_LINK,
    ) -> None:
        self.stage, self.rank = stage, rank
        self.tensor, self.replica = tensor, replica
        self.link = link

    @staticmethod
    def of_one_stage(comm: Communicator) -> Pipeline:
        """Return the groups of a rank whose tensor-parallel group is the whole replica."""
        return Pipeline(WHOLE_MODEL, comm.rank, comm, comm)

    def take_collective_s(self) -> dict[str, float]:
        """Return the seconds of each kind of the stage's collectives since the last call; none of a single rank."""
        return self.tensor.take_seconds() if isinstance(self.tensor, ReplaceableGroup) else {}

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        """Leave the groups, as Communicator.close does."""
        self.link.close()
        self.tensor.close(drop_recordings)
        if self.replica is not self.tensor:
            self.replica.close()


# Of the only rank of a replica.
SINGLE_RANK = Pipeline.of_one_stage(SingleRank())
