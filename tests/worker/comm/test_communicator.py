"""SingleRank: collectives of a group of one rank."""

from __future__ import annotations

import torch

from quire.worker.comm.communicator import SingleRank


def test_single_rank_returns_its_tensor() -> None:
    comm, tensor = SingleRank(), torch.ones(3)
    assert comm.all_reduce(tensor) is tensor
    assert comm.all_gather(tensor).shape == (1, 3)
