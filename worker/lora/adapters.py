"""RankAdapters: applies a plan's orders for adapters on one rank."""

from __future__ import annotations

from functools import partial

import torch

from ...proto.config import LoraConfig
from ...proto.lora import LoraReport
from ...proto.model.target_modules import TargetModules
from ...proto.step import StepPlan
from ..comm.communicator import Communicator
from .adapter import read_adapter
from .adapter_store import AdapterStore
from .layers import NO_LORA, LoraLayers
from .step_adapters import NO_ADAPTERS, StepAdapters

# A step without anything to compute waits this long for an adapter that is read: the scheduler plans such steps, one
# after the other, while nothing else runs.
IDLE_WAIT_S = 0.05


class RankAdapters:
    """One rank's adapters; none without LoRA, when no plan has orders.

    Args:
        config: None without LoRA.

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
