"""RankModels: loads the models of one rank from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ...proto.config import EngineConfig, ModelConfig
from ...proto.model.quantization import read_quantization
from ..comm.communicator import Communicator
from ..lora.layers import NO_LORA, LoraLayers
from ..memory.allocation import out_of_memory_as
from ..memory.shared_segment import SegmentAddress
from ..models.load_context import LoadContext
from ..models.loader import Model, load_model
from ..pooling.head import read_head
from ..pooling.pooler import Pooler
from ..weights.checkpoint import Checkpoint, ProgressCallback
from ..weights.node_cache import weights_folder
from ..weights.standby_weights import StandbyWeights
from ..weights.weight_segment import NoStore, SegmentReader, WeightStore


class RankModels:
    """Loads the served model, and the models that draft for it.

    Args:
        inherited: segments with the weights of the rank that this one replaces.
    """

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        inherited: Sequence[SegmentAddress] = (),
    ) -> None:
        self._config, self._comm, self._dtype, self._device = config, comm, dtype, device
        self._standby = StandbyWeights(inherited) if config.parallel.standby_weights else None

    @property
    def segments(self) -> tuple[SegmentAddress, ...]:
        """Return the segments that hold the weights in use."""
        return () if self._standby is None else self._standby.addresses

    def drop_segments(self) -> None:
        """Close the segments, before the weights are dropped."""
        if self._standby is not None:
            self._standby.drop()

    def load(
        self,
        model: ModelConfig,
        on_progress: ProgressCallback | None = None,
        lora: LoraLayers = NO_LORA,
    ) -> tuple[Model, Pooler | None]:
        """Load a model, and its pooler if it has one. Raises as `open` does."""
        with self.open(model, on_progress, lora) as load:
            pooler = None
            if model.pooling is not None:
                head = read_head(load, model, model.pooling)
                pooler = Pooler(model.pooling, head, self._config.scheduler.max_num_seqs, self._device)
            return load_model(load, model), pooler

    @contextmanager
    def open(
        self,
        model: ModelConfig,
        on_progress: ProgressCallback | None = None,
        lora: LoraLayers = NO_LORA,
    ) -> Iterator[LoadContext]:
        """Open a model's checkpoint. Raises ConfigError if what the body loads does not fit into memory."""
        config, comm = self._config, self._comm
        folder = weights_folder(model.path)
        with ExitStack() as opened:
            checkpoint = opened.enter_context(closing(Checkpoint(folder, on_progress, comm.size)))
            store = opened.enter_context(self._open_store(folder, model))
            if isinstance(store, SegmentReader):
                checkpoint.ignore_all()
            load = LoadContext(
                checkpoint,
                comm,
                self._dtype,
                self._device,
                read_quantization(model),
                fused_all_reduce=config.parallel.fused_all_reduce,
                lora=lora,
                expert_parallel=config.parallel.enable_expert_parallel,
                store=store,
                dp_attention=config.parallel.enable_dp_attention,
                batch_invariant=config.parallel.batch_invariant,
            )
            with out_of_memory_as(f"{model.name} does not fit into the memory of rank {comm.rank}"):
                yield load

    @contextmanager
    def _open_store(self, folder: Path, model: ModelConfig) -> Iterator[WeightStore]:
        if self._standby is None:
            yield NoStore()
            return
        settings = f"{self._comm.rank} {self._dtype} {self._config.parallel} {replace(model, path='')}"
        with self._standby.store(folder, settings) as store:
            yield store
