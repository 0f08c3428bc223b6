"""Hidden states for a draft head reach the first stage in order, and no stage waits until they are taken."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.kernels.native.library import is_available
from quire.proto.model.parallel_split import ParallelSplit
from quire.worker.comm import ring_transfers
from quire.worker.comm.replica_groups import ReplicaGroups
from quire.worker.comm.torch_distributed import create_store

HOST = "127.0.0.1"
SPLIT = ParallelSplit(pipeline=3, stage_sizes=(1, 1, 1))
STEPS = range(3)

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")


def features_of(stage: int, step: int) -> torch.Tensor:
    return torch.full((5000, stage), float(10 * stage + step))


def test_features_of_long_steps_do_not_hold_up_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring would be full after the first step."""
    monkeypatch.setattr(ring_transfers, "RING_BYTES", 4096)
    store, port = create_store(HOST)
    have_sent = threading.Barrier(3)

    def run(rank: int) -> None:
        groups = ReplicaGroups(SPLIT, rank, torch.device("cpu"), 60.0)
        pipeline = groups.join(HOST, port)
        link = pipeline.link
        if rank == 0:
            arrivals = [link.receive_tokens(1) for _ in STEPS]
            for step in STEPS:
                for stage in (1, 2):
                    link.expect_features(stage, torch.empty_like(features_of(stage, step)))
            have_sent.wait(60)
            for step, arrival in zip(STEPS, arrivals, strict=True):
                assert arrival.wait().tolist() == [step]
                for stage in (1, 2):
                    assert link.take_features(stage).equal(features_of(stage, step))
        else:
            for step in STEPS:
                if rank == 2:
                    link.send_tokens(torch.tensor([step], dtype=torch.int32))
                link.send_features(features_of(rank, step))
            have_sent.wait(60)
        pipeline.replica.barrier()
        pipeline.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    del store
