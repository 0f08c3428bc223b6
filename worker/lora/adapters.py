"""RankAdapters: applies the orders of plans for adapters on one rank, which an AdapterStore has in host memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from ...proto.config import LoraConfig
from ...proto.errors import in_one_line
from ...proto.lora import LoraLoad, LoraReport
from ...proto.model.target_modules import TargetModules
from ...proto.step import StepPlan
from ..comm.communicator import Communicator
from .adapter import LoraAdapter, read_adapter
from .layers import NO_LORA, LoraLayers
from .step_adapters import NO_ADAPTERS, StepAdapters

_log = logging.getLogger(__name__)


class AdapterStore:
    """Adapters in host memory by the scheduler's number. For one thread, beside the store's own.

    Args:
        read: returns the adapter in a directory.
    """

    def __init__(self, rank: int, read: Callable[[str], LoraAdapter]) -> None:
        self._rank = rank
        self._read = read
        self._adapters: dict[int, LoraAdapter] = {}
        self._reading: set[int] = set()
        self._ended: SimpleQueue[tuple[LoraReport, LoraAdapter | None]] = SimpleQueue()
        self._has_ended = threading.Event()
        self._orders: SimpleQueue[LoraLoad | None] | None = None  # of the thread, once there is one

    def __len__(self) -> int:
        return len(self._adapters)

    def __getitem__(self, adapter_id: int) -> LoraAdapter:
        return self._adapters[adapter_id]

    def load(self, load: LoraLoad) -> None:
        """Begin to read an adapter; `take_reports` tells its end."""
        self._reading.add(load.adapter_id)
        if self._orders is None:
            self._orders = SimpleQueue()
            threading.Thread(target=self._run, args=(self._orders,), name="lora", daemon=True).start()
        self._orders.put(load)

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter, also while it is read."""
        self._adapters.pop(adapter_id, None)
        self._reading.discard(adapter_id)

    def clear(self) -> None:
        """Forget every adapter."""
        self._adapters.clear()
        self._reading.clear()

    def close(self) -> None:
        """End the thread after what it reads now. Safe to call twice."""
        self.clear()
        if self._orders is not None:
            self._orders.put(None)
            self._orders = None

    def take_reports(self, timeout_s: float = 0.0) -> tuple[LoraReport, ...]:
        """Return the loads that have ended since the last call; wait `timeout_s` for the first, if one is read."""
        if self._reading and timeout_s > 0:
            self._has_ended.wait(timeout_s)
        self._has_ended.clear()
        reports = []
        while not self._ended.empty():
            report, adapter = self._ended.get()
            if report.adapter_id not in self._reading:
                continue  # dropped meanwhile
            self._reading.discard(report.adapter_id)
            if adapter is not None:
                self._adapters[report.adapter_id] = adapter
            reports.append(report)
        return tuple(reports)

    def _run(self, orders: SimpleQueue[LoraLoad | None]) -> None:
        while (load := orders.get()) is not None:
            if load.adapter_id in self._reading:
                self._ended.put(self._load(load))
                self._has_ended.set()

    def _load(self, load: LoraLoad) -> tuple[LoraReport, LoraAdapter | None]:
        try:
            adapter = self._read(load.path)
        except (OSError, ValueError) as error:
            return LoraReport(self._rank, load.adapter_id, error=in_one_line(error)), None
        except Exception as error:
            _log.exception("the adapter in %s could not be read", load.path)
            return LoraReport(self._rank, load.adapter_id, error=in_one_line(error)), None
        return LoraReport(self._rank, load.adapter_id, adapter.digest), adapter


# A step without anything to compute waits this long for an adapter that is read: the scheduler plans such steps, one
# after the other, while nothing else runs.
IDLE_WAIT_S = 0.05


class RankAdapters:
    """One rank's adapters; none without LoRA, when no plan has orders.

    Args:
        config: None without LoRA.
        comm: all ranks of the replica.

    Attributes:
        layers: the slots on the device.
        store: the adapters in host memory.
    """

    def __init__(
        self, config: LoraConfig | None, comm: Communicator, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = NO_LORA
        if config is not None:
            targets = TargetModules(config.target_modules)
            self.layers = LoraLayers(config.max_loras, config.max_lora_rank, dtype, device, targets)
        self.store = AdapterStore(comm.rank, partial(read_adapter, layers=self.layers))
        self._comm = comm

    def apply(self, plan: StepPlan) -> None:
        """Apply step 0 of the plan.

        Raises:
            KeyError: the scheduler names an adapter that is not in host memory.
        """
        if not self.layers.num_slots:
            return
        for adapter_id in plan.lora_drops.tolist():
            self.store.drop(adapter_id)
        for load in plan.lora_loads:
            self.store.load(load)
        for slot, adapter_id in plan.lora_slots.tolist():
            adapter = self.store[adapter_id]
            for layer, factors in zip(self.layers, adapter.factors, strict=True):
                layer.put(slot, factors)

    def begin_step(self, step: StepAdapters) -> None:
        """Set the adapters of the tokens of the following forward pass."""
        self.layers.step = step

    def take_reports(self, *, is_idle: bool) -> tuple[LoraReport, ...]:
        """Return the ends of loads.

        Args:
            is_idle: the step computes nothing on any rank, so it waits a moment.
        """
        if not self.layers.num_slots:
            return ()
        reports = self.store.take_reports(IDLE_WAIT_S if is_idle else 0.0)
        if is_idle:
            self._comm.barrier()  # nothing else would keep rank 0 from running ahead of a rank that still reads
        return reports

    def clear(self) -> None:
        """Forget every adapter; what the slots hold is not used any more."""
        self.begin_step(NO_ADAPTERS)
        self.store.clear()

    def close(self) -> None:
        """End the thread of the store. Safe to call twice."""
        self.store.close()
