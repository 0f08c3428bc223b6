"""RankModels: loads the models of one rank from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from ..proto.config import EngineConfig, ModelConfig
from .comm.communicator import Communicator
from .lora.layers import LoraLayers
from .memory.allocation import out_of_memory_as
from .models.load_context import LoadContext
from .models.loader import Model, load_model
from .pooling.head import read_head
from .pooling.pooler import Pooler
from .weights.checkpoint import Checkpoint, ProgressCallback
from .weights.node_cache import weights_folder
from .weights.quantization import read_quantization


class RankModels:
    """Loads the served model, and the models that draft for it."""

    def __init__(
        self, config: EngineConfig, comm: Communicator, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._comm, self._dtype, self._device = config, comm, dtype, device

    def load(
        self,
        model: ModelConfig,
        on_progress: ProgressCallback | None = None,
        lora: LoraLayers | None = None,
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
        lora: LoraLayers | None = None,
    ) -> Iterator[LoadContext]:
        """Open a model's checkpoint. Raises ConfigError if what the body loads does not fit into memory."""
        config, comm = self._config, self._comm
        folder = weights_folder(model.path)
        with closing(Checkpoint(folder, on_progress, comm.size)) as checkpoint:
            load = LoadContext(
                checkpoint,
                comm,
                self._dtype,
                self._device,
                read_quantization(model),
                config.parallel.fused_all_reduce,
                lora,
                config.parallel.enable_expert_parallel,
            )
            with out_of_memory_as(f"{model.name} does not fit into the memory of rank {comm.rank}"):
                yield load
