"""Pipeline: the groups of one rank of a replica, and its links to the neighboring pipeline stages."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...proto.model.parallel_split import WHOLE_MODEL, ParallelSplit, Stage
from .communicator import Communicator, ReplaceableGroup, SingleRank, nothing
from .ring_transfers import Transfer, Transfers

# Sends of a kind to a rank that may be unfinished. The receiver of hidden states takes them as fast as it computes,
# that of tokens before it sends the hidden states that they are sampled from, and that of features expects them from
# then on.
_MAX_UNFINISHED = 8
# Transfers of a kind have tags of their own, in turns, so that no two in flight are taken for each other.
_NUM_TAGS = 64
_STATES, _TOKENS, _DRAFTS, _FEATURES = range(4)


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

    def send_tokens(self, token_ids: Tensor, *, to_all: bool = False) -> None:
        """Send sampled tokens, [N] int32, from the last stage to the first; nobody may write to them any more.

        Args:
            to_all: to all other stages.
        """
        ...

    def receive_tokens(self, count: int) -> TokenArrival:
        """Begin to receive sampled tokens from the last stage."""
        ...

    def send_drafts(self, drafts: Tensor) -> None:
        """Send drafted tokens, [N] int32, from the first stage to all others; nobody may write to them any more."""
        ...

    def receive_drafts(self, count: int) -> Tensor:
        """Return what the first stage sends, [N] int32."""
        ...

    def send_features(self, features: Tensor) -> None:
        """Send what a draft head reads, [T, F], to the first stage; nobody may write to it any more."""
        ...

    def expect_features(self, stage: int, out: Tensor) -> None:
        """Begin to fill `out`, [T, F], with what a stage sends by `send_features`."""
        ...

    def take_features(self, stage: int) -> Tensor:
        """Return the oldest tensor that is expected of a stage; wait for it."""
        ...

    def recording(self, max_tokens: int) -> AbstractContextManager[None]:
        """Let the steps of the body be recorded ones, of at most so many tokens; see RecordableLink."""
        ...

    def begin_replay(self, num_tokens: int) -> None:
        """Receive the hidden states that a recorded step reads."""
        ...

    def end_replay(self, states: Tensor) -> None:
        """Send the output of a recorded step."""
        ...

    def close(self) -> None:
        """End all transfers, and forget unfinished ones. Safe to call twice."""
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

    def send_tokens(self, token_ids: Tensor, *, to_all: bool = False) -> None:
        raise AssertionError("there is no first stage")

    def receive_tokens(self, count: int) -> TokenArrival:
        raise AssertionError("there is no last stage")

    def send_drafts(self, drafts: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def receive_drafts(self, count: int) -> Tensor:
        raise AssertionError("there is no first stage")

    def send_features(self, features: Tensor) -> None:
        raise AssertionError("there is no first stage")

    def expect_features(self, stage: int, out: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def take_features(self, stage: int) -> Tensor:
        raise AssertionError("there is no other stage")

    def recording(self, max_tokens: int) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_replay(self, num_tokens: int) -> None:
        pass

    def end_replay(self, states: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


NO_LINK = NoLink()


class RecordableLink(ABC):
    """The transfers of hidden states of a StageLink, which are around recorded steps and not in them.

    A recorded step reads what it receives from a buffer, and what it sends is its output.
    """

    def __init__(self) -> None:
        self._max_tokens = 0  # of the steps that are being recorded
        self._entry: Tensor | None = None  # of all recorded steps
        self._sends_output = False

    @abstractmethod
    def transmit(self, states: Tensor) -> None:
        """Send hidden states to the next stage, as `send_states`."""
        ...

    @abstractmethod
    def fill(self, out: Tensor) -> Tensor:
        """Receive hidden states of the previous stage, as `receive_states`."""
        ...

    def send_states(self, states: Tensor) -> None:
        if self._max_tokens:
            self._sends_output = True
        else:
            self.transmit(states)

    def receive_states(self, out: Tensor) -> Tensor:
        if not self._max_tokens:
            return self.fill(out)
        if self._entry is None:
            self._entry = out.new_zeros(self._max_tokens, out.shape[1])
        return self._entry[: len(out)]

    @contextmanager
    def recording(self, max_tokens: int) -> Iterator[None]:
        """Let the steps of the body be recorded ones.

        Args:
            max_tokens: of the largest one of all.
        """
        self._max_tokens = max_tokens
        try:
            yield
        finally:
            self._max_tokens = 0

    def begin_replay(self, num_tokens: int) -> None:
        """Receive what a recorded step reads."""
        if self._entry is not None:
            self.fill(self._entry[:num_tokens])

    def end_replay(self, states: Tensor) -> None:
        """Send the output of a recorded step, [T, E], which the next replay overwrites."""
        if self._sends_output:
            self.transmit(states.clone())

    def close(self) -> None:
        # Steps are recorded anew in the next group.
        self._entry, self._sends_output = None, False


class GroupLink(RecordableLink):
    """StageLink by sends and receives, and the arrival of tokens, which come in order.

    On a GPU the device transfers, and the host does not wait. A send or a receive of NCCL occupies its connection
    until the other rank takes part. So tokens have connections of their own, and are received when they are needed,
    as are the features of a step, which follow its tokens.

    Args:
        device: of the tensors.
    """

    def __init__(self, rank: int, split: ParallelSplit, device: torch.device) -> None:
        super().__init__()
        self.awaited = ""
        self._rank, self._device = rank, device
        self._previous, self._next = rank - split.tensor, rank + split.tensor
        self._size, self._first = split.tensor, split.place_of(rank).tensor
        self._last = split.result_rank + self._first
        self._transfers: dict[int, Transfers] = {}  # by kind
        self._unfinished: defaultdict[tuple[int, int], deque[Transfer]]  # by kind and receiver
        self._unfinished = defaultdict(deque)
        self._arrivals: deque[Callable[[], Transfer]] = deque()  # of tokens, the oldest first
        self._features: defaultdict[int, deque[Callable[[], Transfer]]]  # by sender, the oldest first
        self._features = defaultdict(deque)
        self._num_sent: Counter[tuple[int, int]] = Counter()  # by kind and receiver
        self._num_received: Counter[tuple[int, int]] = Counter()  # by kind and sender
        self._waited_s = 0.0
        self.peers = [each for each in range(self._first, split.num_ranks, split.tensor) if each != rank]

    def use(self, states: Transfers, tokens: Transfers, features: Transfers) -> None:
        """Transfer by these from now on, after `close`."""
        self._transfers = {_STATES: states, _DRAFTS: states, _TOKENS: tokens, _FEATURES: features}

    def take_waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def transmit(self, states: Tensor) -> None:
        self._send(_STATES, states, self._next)

    def fill(self, out: Tensor) -> Tensor:
        transfer = self._receive(_STATES, out, self._previous)
        return self._wait(transfer, f"hidden states of rank {self._previous}")

    def send_tokens(self, token_ids: Tensor, *, to_all: bool = False) -> None:
        for rank in self.peers if to_all else [self._first]:
            self._send(_TOKENS, token_ids, rank)

    def receive_tokens(self, count: int) -> TokenArrival:
        self._arrivals.append(self._begin_receive(_TOKENS, self._empty(count), self._last))
        return self

    def wait(self) -> Tensor:
        """Return the tokens of the oldest step that are awaited."""
        if not self._arrivals:
            raise ConnectionError(f"rank {self._rank} has left the group")
        return self._wait(self._arrivals.popleft()(), f"tokens of rank {self._last}")

    def send_drafts(self, drafts: Tensor) -> None:
        for rank in self.peers:
            self._send(_DRAFTS, drafts, rank)

    def receive_drafts(self, count: int) -> Tensor:
        transfer = self._receive(_DRAFTS, self._empty(count), self._first)
        return self._wait(transfer, f"drafts of rank {self._first}")

    def send_features(self, features: Tensor) -> None:
        self._send(_FEATURES, features, self._first)

    def expect_features(self, stage: int, out: Tensor) -> None:
        rank = stage * self._size + self._first
        self._features[rank].append(self._begin_receive(_FEATURES, out, rank))

    def take_features(self, stage: int) -> Tensor:
        rank = stage * self._size + self._first
        if not self._features[rank]:
            raise ConnectionError(f"rank {self._rank} has left the group")
        return self._wait(self._features[rank].popleft()(), f"features of rank {rank}")

    def close(self) -> None:
        super().close()
        # Arrivals refer to the transfers, which would keep the connections of a group that is left.
        self._unfinished.clear()
        self._arrivals.clear()
        self._features.clear()
        self._num_sent.clear()
        self._num_received.clear()
        for transfers in self._transfers.values():
            transfers.close()
        self._transfers.clear()

    def _empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=self._device)

    def _send(self, kind: int, tensor: Tensor, rank: int) -> None:
        unfinished = self._unfinished[kind, rank]
        while len(unfinished) >= _MAX_UNFINISHED:
            self._wait(unfinished.popleft(), f"rank {rank} to take what was sent")
        self._num_sent[kind, rank] += 1
        tag = kind * _NUM_TAGS + self._num_sent[kind, rank] % _NUM_TAGS
        began_at, self.awaited = time.perf_counter(), f"rank {rank} to take what is sent"
        try:
            unfinished.append(self._by(kind).send(tensor.contiguous(), rank, tag))
        finally:
            self.awaited = ""
            self._waited_s += time.perf_counter() - began_at

    def _begin_receive(self, kind: int, out: Tensor, rank: int) -> Callable[[], Transfer]:
        """Return what gives the receive, which is posted now on a CPU, so that the sender never waits."""
        receive = partial(self._receive, kind, out, rank)
        if self._device.type != "cpu":
            return receive
        posted = receive()
        return lambda: posted

    def _receive(self, kind: int, out: Tensor, rank: int) -> Transfer:
        self._num_received[kind, rank] += 1
        tag = kind * _NUM_TAGS + self._num_received[kind, rank] % _NUM_TAGS
        return self._by(kind).receive(out, rank, tag)

    def _by(self, kind: int) -> Transfers:
        if kind not in self._transfers:
            raise ConnectionError(f"rank {self._rank} has left the group")
        return self._transfers[kind]

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
        attention: with data-parallel attention, the ranks that attend for the same sequences as this one.

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
        attention: Communicator | None = None,
    ) -> None:
        self.stage, self.rank = stage, rank
        self.tensor, self.replica = tensor, replica
        self.link = link
        self.attention = SingleRank() if attention is None else attention

    @staticmethod
    def of_one_stage(comm: Communicator, attention: Communicator | None = None) -> Pipeline:
        """Return the groups of a rank whose tensor-parallel group is the whole replica."""
        return Pipeline(WHOLE_MODEL, comm.rank, comm, comm, attention=attention)

    def take_collective_s(self) -> dict[str, float]:
        """Return the seconds of each kind of the stage's collectives since the last call; none of a single rank."""
        seconds = Counter[str]()
        for group in (self.tensor, self.attention):
            if isinstance(group, ReplaceableGroup):
                seconds.update(group.take_seconds())
        return dict(seconds)

    def close(self, drop_recordings: Callable[[], object] = nothing) -> None:
        """Leave the groups, as Communicator.close does."""
        # The link first: steps of a GPU, for whose end the tensor-parallel group waits, may wait for its transfers.
        self.link.close()
        if self.replica is not self.tensor:
            self.replica.close()
        self.tensor.close(drop_recordings)
        self.attention.close(drop_recordings)


# Of the only rank of a replica.
SINGLE_RANK = Pipeline.of_one_stage(SingleRank())
