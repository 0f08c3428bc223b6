"""SumsBackend: what sums the ranks' tensors together with the following norm, by the option all_reduce_backend."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, Protocol

import msgpack
import torch
from torch import Tensor

from ...kernels.all_reduce_norm import FusedSum
from ...proto.config import EngineConfig
from ...proto.errors import ConfigError
from ..comm.all_reduce_choice import choose_all_reduce, choose_max_tokens
from ..comm.communicator import Communicator
from ..comm.symmetric_memory import MAX_BYTES, check_places, open_symmetric_memory
from ..comm.torch_distributed import TorchDistributed
from .choice import choose_library
from .installed import FLASHINFER_SUMS, Capability, Library
from .model_fit import DTYPES

# Numbers of ranks that its kernels are instantiated for, and numbers of a token that a thread loads at a time.
RANKS, NUMBERS_PER_LOAD = (2, 4, 8), 8


class SumsBackend(Protocol):
    """Opens the memory in which the ranks of a group sum tensors."""

    def open(
        self, comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> FusedSum:
        """Open it for tensors [T, hidden_size]; all ranks call it, and measure how many tokens it is the fastest for.

        Raises:
            ConfigError: the ranks cannot read each other's memory.
        """
        ...


class OwnSums:
    """SumsBackend by the kernel of quire."""

    def open(
        self, comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> FusedSum:
        peers = open_symmetric_memory(comm, hidden_size, dtype, device)
        choose_all_reduce(peers, comm)
        return peers


class FlashInferSums:
    """SumsBackend with the kernels that FlashInfer has from TensorRT-LLM.

    Args:
        module: ``flashinfer.comm``.
    """

    library: ClassVar[Library] = FLASHINFER_SUMS

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def load(cls, device: torch.device) -> FlashInferSums:
        """Import the installed library."""
        return cls(importlib.import_module("flashinfer.comm"))

    @staticmethod
    def find_problem(config: EngineConfig, capability: Capability) -> str:
        """Return why it would sum nothing of a model; empty if it sums something."""
        num_ranks, size = config.parallel.tensor_parallel_size, config.model.hf.get("hidden_size", 0)
        if num_ranks not in RANKS:
            return f"there are {num_ranks} ranks, it supports {', '.join(map(str, RANKS))}"
        if getattr(torch, config.model.dtype) not in DTYPES:
            return f"the model's dtype is {config.model.dtype}"
        if size % NUMBERS_PER_LOAD:
            return f"the model's hidden size {size} is no multiple of {NUMBERS_PER_LOAD}"
        return ""

    def open(
        self, comm: Communicator, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> FusedSum:
        if not isinstance(comm, TorchDistributed):
            raise ConfigError("fused_all_reduce needs several ranks, each on a GPU of its own")
        check_places(comm, device)
        found = FlashInferSum(self._module, comm, hidden_size, dtype)
        found.max_tokens = choose_max_tokens(found, comm, hidden_size, dtype, device)
        return found


class FlashInferSum:
    """FusedSum with FlashInfer. Its memory is exchanged by the store of the group.

    Attributes:
        max_tokens: tokens of the largest sum.
    """

    def __init__(self, module: Any, comm: TorchDistributed, hidden_size: int, dtype: torch.dtype) -> None:
        self.max_tokens = max(1, MAX_BYTES // (hidden_size * dtype.itemsize))
        self._fuse: Any = module.allreduce_fusion
        self._pattern: int = module.AllReduceFusionPattern.kARResidualRMSNorm
        self._workspace: Any = module.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=comm.size,
            rank=comm.rank,
            max_token_num=self.max_tokens,
            hidden_dim=hidden_size,
            dtype=dtype,
            comm_backend=StoreBackend(comm),
        )

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As kernels.all_reduce_norm.all_reduce_add_rms_norm; sums in float32."""
        out = torch.empty_like(x)
        self._fuse(
            input=x,
            workspace=self._workspace,
            pattern=self._pattern,
            residual_in=residual,
            residual_out=residual,
            norm_out=out,
            rms_gamma=weight,
            rms_eps=eps,
            fp32_acc=True,
        )
        return out


class StoreBackend:
    """FlashInfer's CommBackend over the store of a group: exchanges the handles of memory when it is opened.

    torch's default process group, which FlashInfer would take, is not there.
    """

    def __init__(self, comm: TorchDistributed) -> None:
        self._comm = comm
        self._num_exchanges = 0

    def Get_rank(self) -> int:
        return self._comm.rank

    def Get_size(self) -> int:
        return self._comm.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Return the data of all ranks: numbers, text, bytes and tuples of them, of which handles consist.

        Raises:
            TypeError: the data are something else. The store is read from the network, so that nothing is pickled.
        """
        self._num_exchanges += 1
        keys = [f"quire/sums/{self._num_exchanges}/{rank}" for rank in range(self._comm.size)]
        self._comm.store.set(keys[self._comm.rank], msgpack.packb(data))
        return tuple(msgpack.unpackb(self._comm.store.get(key), use_list=False) for key in keys)

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self.allgather(None)

    def Split(self, color: int, key: int) -> StoreBackend:
        """Return the group itself: it is not divided."""
        colors = self.allgather(color)
        assert len(set(colors)) == 1, f"the group would be divided into {colors}"
        return self


def choose_sums(config: EngineConfig, device: torch.device) -> SumsBackend | None:
    """Return what sums a rank's tensors; None if that is not fused with the norm. See choose_library."""
    if not config.parallel.fused_all_reduce:
        return None
    wanted = config.parallel.all_reduce_backend
    return choose_library("all_reduce_backend", wanted, (FlashInferSums,), config, device) or OwnSums()
