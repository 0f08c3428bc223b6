"""ExpertBalancer: moves experts between the ranks while they serve, by the measured load of each expert.

Every rank decides alike from the same loads, reads its new experts on a thread, and all of them change the placement
between the same two steps. Nothing of it goes through the scheduler, and no request waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from ...proto.errors import in_one_line
from ...proto.model.expert_placement import Placement, imbalance, rebalance
from ..comm.communicator import Communicator
from ..models.moe.expert_layers import ExpertLayers
from ..models.moe.moe import MixtureOfExperts
from ..models.moe.replicas import Replicas

# Layer |-> experts to read.
Orders = Mapping[int, Sequence[int]]
ReadExperts = Callable[[Orders], dict[int, ExpertLayers]]

# Steps between two questions whether all ranks have read their experts: each is a gather of a number.
_STEPS_PER_QUESTION = 16
# A layer moves experts if that lowers the load of its busiest rank by this part.
_LEAST_GAIN = 0.05
_READING, _READY, _FAILED = range(3)

_log = logging.getLogger(__name__)


class NoBalancer:
    """Of models whose experts stay where they are."""

    def agree(self) -> None:
        """Do nothing."""

    def after_step(self) -> None:
        """Do nothing."""


class ExpertBalancer:
    """The moves of one rank.

    Args:
        mixtures: by layer, each with Replicas.
        comm: the ranks that the experts are divided over.
        interval: steps between two decisions.
        read: reads experts from the weights in use; called on a thread of its own while steps run.

    Attributes:
        num_moves: of experts, to slots of all ranks.
    """

    def __init__(
        self, mixtures: Sequence[MixtureOfExperts], comm: Communicator, interval: int, read: ReadExperts
    ) -> None:
        self._mixtures, self._comm, self._interval, self._read = mixtures, comm, interval, read
        self._replicas = [own.replicas for own in mixtures if isinstance(own.replicas, Replicas)]
        assert len(self._replicas) == len(mixtures), "a layer has no replicas"
        self._version = 0  # placements that were taken before the present one
        self._num_steps = 0
        self._wanted: list[Placement] | None = None  # the placements that the ranks prepare for
        self._reading = Reading()
        self.num_moves = 0

    def agree(self) -> None:
        """Take the newest placement of all ranks; a rank that was replaced has the first one. All ranks call it.

        Raises:
            OSError, ModelLoadError: the experts cannot be read.
        """
        self._num_steps, self._wanted = 0, None
        own = torch.tensor([[self._version, *(slot for each in self._replicas for slot in each.placement)]])
        gathered = self._comm.all_gather(own.to(self._replicas[0].loads.device)).flatten(1).tolist()
        newest = max(gathered, key=lambda row: row[0])
        if all(row == newest for row in gathered):
            return
        self._version, size = newest[0], len(self._replicas[0].placement)
        placements = [tuple(newest[1:][layer * size :][:size]) for layer in range(len(self._replicas))]
        _log.info("takes the placement of experts that the other ranks have")
        self._take(placements, self._read(self._orders(placements)))

    def after_step(self) -> None:
        """Decide, or take what was decided, if it is time; all ranks call it after each step."""
        self._num_steps += 1
        if self._wanted is not None:
            if self._num_steps % _STEPS_PER_QUESTION == 0:
                self._finish(self._wanted)
        elif self._num_steps % self._interval == 0:
            self._decide()

    def _decide(self) -> None:
        own = torch.stack([each.loads for each in self._replicas])
        loads: list[list[float]] = self._comm.all_gather(own).sum(dim=0).tolist()
        for each in self._replicas:
            each.loads.mul_(0.5)  # older steps count less
        size, wanted, worst = self._comm.size, [], [1.0, 1.0]
        for each, of_experts in zip(self._replicas, loads, strict=True):
            placement = rebalance(of_experts, each.placement, size)
            before, after = (imbalance(of_experts, own, size) for own in (each.placement, placement))
            wanted.append(placement if after < before * (1 - _LEAST_GAIN) else each.placement)
            worst = [max(worst[0], before), max(worst[1], min(before, after))]
        if all(placement == each.placement for placement, each in zip(wanted, self._replicas, strict=True)):
            return
        if self._comm.rank == 0:
            _log.info("moves experts: the busiest rank had %.2f times the mean load, expects %.2f", *worst)
        self._wanted = wanted
        self._reading = Reading(self._read, self._orders(wanted))

    def _finish(self, wanted: list[Placement]) -> None:
        """Take the placement if all ranks have read their experts; drop it if one cannot."""
        state = torch.tensor([self._reading.state], device=self._replicas[0].loads.device)
        states = self._comm.all_gather(state).flatten().tolist()
        if _FAILED in states:
            _log.warning("experts stay where they are: rank %d could not read its own", states.index(_FAILED))
            self._wanted = None
        elif all(state == _READY for state in states):
            self._wanted = None
            self._version += 1
            self._take(wanted, self._reading.layers)
        if self._wanted is None:
            self._reading = Reading()

    def _orders(self, placements: Sequence[Placement]) -> dict[int, list[int]]:
        """Return the experts that this rank has to read: those of its slots that change."""
        changes = {
            layer: [placements[layer][slot] for slot in _changed(each, placements[layer])]
            for layer, each in enumerate(self._replicas)
        }
        return {layer: experts for layer, experts in changes.items() if experts}

    def _take(self, placements: Sequence[Placement], layers: Mapping[int, ExpertLayers]) -> None:
        for layer, (mixture, replicas) in enumerate(zip(self._mixtures, self._replicas, strict=True)):
            placement = placements[layer]
            if layer in layers:
                places = [slot - replicas.own.start for slot in _changed(replicas, placement)]
                mixture.take_experts(places, layers[layer])
            self.num_moves += sum(old != new for old, new in zip(replicas.placement, placement, strict=True))
            replicas.place(placement)


class Reading:
    """The reading of experts on a thread of its own, or of none.

    Attributes:
        layers: what was read, when `state` is _READY.
    """

    def __init__(self, read: ReadExperts | None = None, orders: Orders | None = None) -> None:
        self.layers: dict[int, ExpertLayers] = {}
        self.state = _READING if orders else _READY
        if read is not None and orders:
            threading.Thread(target=self._run, args=(read, orders), daemon=True).start()

    def _run(self, read: ReadExperts, orders: Orders) -> None:
        try:
            self.layers = read(orders)
            self.state = _READY
        except Exception as error:  # the thread's end; the ranks agree to stay as they are
            _log.warning("cannot read experts to move: %s", in_one_line(error))
            self.state = _FAILED


def _changed(replicas: Replicas, placement: Placement) -> list[int]:
    """Return this rank's slots that get another expert."""
    return [slot for slot in replicas.own if replicas.placement[slot] != placement[slot]]
