"""ReplicaGroups: the groups that a rank joins at rank 0's store, and joins anew after a failure."""

from __future__ import annotations

import torch

from ...proto.model.parallel_split import ParallelSplit
from .communicator import Communicator, ReplaceableGroup, SingleRank
from .pipeline import GroupLink, Pipeline
from .ring_transfers import RingTransfers, Transfers
from .shared_memory import join_group
from .torch_distributed import TorchDistributed


class ReplicaGroups:
    """The groups of one rank. With one stage, the tensor-parallel group has all ranks.

    Args:
        timeout_s: least deadline of joining and of each collective.

    Attributes:
        pipeline: the groups as the model has them, which stay the same objects; set by `join`.
    """

    pipeline: Pipeline

    def __init__(self, split: ParallelSplit, rank: int, device: torch.device, timeout_s: float) -> None:
        self._split, self._rank, self._device, self._timeout_s = split, rank, device, timeout_s
        self._tensor: ReplaceableGroup[Communicator] | None = None
        self._attention: ReplaceableGroup[Communicator] | None = None
        self._replica: ReplaceableGroup[TorchDistributed] | None = None
        self._link: GroupLink | None = None

    def join(self, host: str, port: int, *, replaceable: bool = True) -> Pipeline:
        """Join the groups for the first time. Raises ConnectionError: a rank did not join in time."""
        if not replaceable:
            self.pipeline = Pipeline.of_one_stage(
                self._join_tensor(host, port), self._join_attention(host, port)
            )
            return self.pipeline
        if self._split.pipeline == 1:
            self._tensor = ReplaceableGroup(self._join_tensor(host, port))
            self.pipeline = Pipeline.of_one_stage(self._tensor, self._share_attention(host, port))
            return self.pipeline
        replica = self._replica = ReplaceableGroup(self._join_replica(host, port))
        tensor: Communicator = SingleRank()
        if self._split.tensor > 1:
            tensor = self._tensor = ReplaceableGroup(self._join_tensor(host, port))
        attention = self._share_attention(host, port)
        link = self._link = GroupLink(self._rank, self._split, self._device)
        link.use(*self._open_transfers(replica.group, link.peers, host, port))
        self.pipeline = Pipeline(
            self._split.stage_of(self._rank), self._rank, tensor, replica, link, attention
        )
        return self.pipeline

    def join_again(self, host: str, port: int) -> None:
        """Leave the present groups and join new ones. Raises as `join` does."""
        self.pipeline.link.close()
        if self._replica is not None:
            self._replica.replace(self._join_replica(host, port))
        if self._tensor is not None:
            self._tensor.replace(self._join_tensor(host, port))
        if self._attention is not None:
            attention = self._join_attention(host, port)
            assert attention is not None
            self._attention.replace(attention)
        if self._replica is not None and self._link is not None:
            self._link.use(*self._open_transfers(self._replica.group, self._link.peers, host, port))

    def _open_transfers(
        self, replica: TorchDistributed, peers: list[int], host: str, port: int
    ) -> tuple[Transfers, Transfers, Transfers]:
        """Return what transfers hidden states between stages, tokens, and hidden states for a draft head.

        The last are taken late: those of a few long steps would fill a ring, and the sender would wait.
        """
        if self._device.type == "cpu":
            rings = RingTransfers(replica, peers, self._timeout_s)
            return rings, rings, replica
        tokens = self._join_replica(host, port, "tokens")
        return replica, tokens, tokens

    def _join_replica(self, host: str, port: int, name: str = "") -> TorchDistributed:
        num_ranks = self._split.num_ranks
        return TorchDistributed.join(self._rank, num_ranks, host, port, self._device, self._timeout_s, name)

    def _join_tensor(self, host: str, port: int) -> Communicator:
        place, size = self._split.place_of(self._rank), self._split.tensor
        name = "" if self._split.pipeline == 1 else f"stage {place.stage}"
        return join_group(place.tensor, size, host, port, self._device, self._timeout_s, name)

    def _share_attention(self, host: str, port: int) -> Communicator | None:
        """Join the ranks that attend for the same sequences for the first time."""
        group = self._join_attention(host, port)
        if group is not None:
            self._attention = ReplaceableGroup(group)
        return self._attention

    def _join_attention(self, host: str, port: int) -> Communicator | None:
        """Join the ranks that attend for the same sequences; return None for this one alone and for a whole stage."""
        split, sharers = self._split, self._split.sharers_of(self._rank)
        if not 1 < len(sharers) < split.tensor:
            return None
        name, own = f"attention {sharers.start}", self._rank - sharers.start
        return join_group(own, len(sharers), host, port, self._device, self._timeout_s, name)
