"""LoadContext: reads each rank's part of a layer's tensors from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...kernels.all_reduce_norm import FusedSum
from ...proto.model.expert_placement import first_placement
from ...proto.model.parallel_split import WHOLE_MODEL, Stage, own_indices
from ...proto.model.quantization import Quantization
from ...proto.options.sections import ALL_REDUCE
from ..comm.communicator import Communicator, SingleRank
from ..comm.expert_exchange import ExpertExchange, SumOfRanks
from ..comm.pipeline import NO_LINK, StageLink
from ..comm.shard import Shard
from ..libraries.all_reduce_backend import SumsBackend
from ..libraries.experts_backend import OWN_EXPERTS, ExpertsBackend
from ..libraries.linear_backend import OWN_LINEAR, LinearBackend, convert_linear
from ..libraries.recurrence_backend import OWN_RECURRENCE, RecurrenceBackend
from ..lora.embedding_adapters import EmbeddingAdapters
from ..lora.expert_adapters import ExpertAdapters
from ..lora.layers import NO_LORA, UNCHANGED, Adapted, ExpertStack, LoraLayer, LoraLayers, UnchangedLayer
from ..lora.step_adapters import LayerTokens
from ..weights.checkpoint import Checkpoint
from ..weights.linear_weight import LinearWeight, read_linear, read_matrix
from ..weights.weight_segment import NoStore, W, WeightStore
from ..weights.weight_slice import WeightSlice


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Context that every layer needs to read its part of the weights.

    Attributes:
        dtype: of the model.
        quantization: of the linear layers, stored or online; None for full precision.
        sums: what sums the ranks' tensors together with the following norm; None: the norm is an op of its own.
        lora: collects the layers that adapters may change.
        expert_parallel: each rank holds some experts whole, instead of a part of each.
        store: holds the large weights, which nobody changes once they are read.
        dp_attention: the ranks of `attention` hold all heads of latent attention, for the sequences of their KV
            blocks.
        attention: the ranks that attend for the same sequences as this one, read with `dp_attention`.
        batch_invariant: as in ParallelConfig.
        tokens: that layers compute.
        peers: memory for sums that are fused with the following norm; None if there are none.
        linear_backend: what multiplies by the weights of linear layers.
        experts_backend: what multiplies by the experts of mixtures.
        recurrence_backend: what computes delta rules.
        stage: the layers of this rank.
        link: to the ranks of other stages.
        shares_output: this stage has the output layer of the last one as well, for its draft head.
        all2all_backend, num_redundant_experts: as in ParallelConfig.
        exchange: the way of tokens to their experts; None for SumOfRanks.
        max_tokens: most tokens of a step.
        balances_experts: experts move between the ranks by their load.
        reads_kv_scales: the KV cache has the scales of the checkpoint.
    """

    checkpoint: Checkpoint
    comm: Communicator
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    sums: SumsBackend | None = None
    lora: LoraLayers = NO_LORA
    expert_parallel: bool = False
    store: WeightStore = field(default_factory=NoStore)
    dp_attention: bool = False
    attention: Communicator = field(default_factory=SingleRank)
    batch_invariant: bool = False
    tokens: LayerTokens = LayerTokens.ALL
    peers: FusedSum | None = None
    linear_backend: LinearBackend = OWN_LINEAR
    experts_backend: ExpertsBackend = OWN_EXPERTS
    recurrence_backend: RecurrenceBackend = OWN_RECURRENCE
    stage: Stage = WHOLE_MODEL
    link: StageLink = NO_LINK
    shares_output: bool = False
    all2all_backend: str = ALL_REDUCE
    exchange: ExpertExchange | None = None
    max_tokens: int = 0
    num_redundant_experts: int = 0
    balances_experts: bool = False
    reads_kv_scales: bool = False

    def keep(self, key: str, read: Callable[[], W]) -> W:
        """Return what `read` returns, from the store. The key is unique in the model."""
        return self.store.keep(key, read)

    def for_own_tokens(self) -> LoadContext:
        """Return the context of layers that the ranks share that attend for the same tokens, for these tokens."""
        return replace(self, comm=self.attention, tokens=LayerTokens.OWN, peers=None)

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor of the model's dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def replicated(self, name: str, *shape: int) -> Tensor:
        """Read a tensor that every rank holds in full."""
        out = self.empty(*shape)
        self.checkpoint.read_into(out, name, shape)
        return out

    def sharded(self, name: str, shape: tuple[int, int], dim: int) -> Tensor:
        """Read this rank's part of a matrix that is sharded along `dim`."""
        shard = self.shard(shape[dim])
        out = self.empty(*(len(shard) if axis == dim else length for axis, length in enumerate(shape)))
        self.checkpoint.read_into(out, name, shape, dim, shard.start)
        return out

    def part(self, name: str, shard: Shard) -> Tensor:
        """Read this rank's part of a tensor of one dimension."""
        out = self.empty(len(shard))
        self.checkpoint.read_into(out, name, (shard.full_len,), 0, shard.start)
        return out

    def kv_scales(self, name: str) -> tuple[float, float] | None:
        """Read the scales of a layer's keys and of its values in the cache; 1 where the checkpoint has none.

        Returns None if tokens have scales of their own.
        """
        if not self.reads_kv_scales:
            return None
        found = [1.0, 1.0]
        for index, part in enumerate("kv"):
            for path in (f"{part}_scale", f"attn.{part}_scale", f"{part}_proj.{part}_scale", "kv_scale"):
                if self.checkpoint.has(f"{name}.{path}"):
                    shape = self.checkpoint.shape_of(f"{name}.{path}")
                    scale = torch.empty(shape, dtype=torch.float32)
                    self.checkpoint.read_into(scale, f"{name}.{path}", shape)
                    found[index] = float(scale)
                    break
        return found[0], found[1]

    def linear(
        self, parts: Sequence[WeightSlice], *, allow_online: bool = True, keep_codes: bool = False
    ) -> LinearWeight:
        """Read the matrix of a linear layer.

        Args:
            parts: slices whose rows are concatenated.
            allow_online: apply online quantization, if requested; False for layers that need full precision.
            keep_codes: as for read_linear.
        """
        quantization = self.quantization
        if quantization is not None and quantization.is_online and not allow_online:
            quantization = None
        return self.keep(
            f"linear {parts} {quantization}",
            lambda: read_linear(
                self.checkpoint, parts, self.dtype, self.device, quantization, keep_codes=keep_codes
            ),
        )

    def linear_layer(self, parts: Sequence[WeightSlice]) -> LinearWeight:
        """Read the matrix of a linear layer in the form that the library of linear layers multiplies by, if any."""
        return convert_linear(self.linear_backend, self.linear(parts))

    def matrix(self, part: WeightSlice, dtype: torch.dtype | None = None) -> Tensor:
        """Read a slice of a matrix; a quantized one is dequantized.

        Args:
            dtype: None for the model's.
        """
        return read_matrix(self.checkpoint, part, dtype or self.dtype, self.device, self.quantization)

    def adapters(self, parts: Sequence[WeightSlice]) -> Adapted:
        """Return the adapters of a linear layer whose weight consists of these slices."""
        return self.lora.add_layer(parts, self.tokens)

    def embedding_adapters(self, name: str, vocab_size: int, size: int) -> EmbeddingAdapters | UnchangedLayer:
        """Return the adapters of an embedding that is sharded by token."""
        shard = self.shard(vocab_size)
        layer = self.lora.add_embedding(WeightSlice(name, (size, vocab_size), 1, shard.start, len(shard)))
        return EmbeddingAdapters(self.lora, layer) if isinstance(layer, LoraLayer) else layer

    def expert_adapters(
        self,
        gate_up: Sequence[Sequence[WeightSlice]],
        down: Sequence[Sequence[WeightSlice]],
        module: str,
        num_experts: int,
    ) -> ExpertAdapters | None:
        """Return the adapters of a mixture's experts. Returns None if adapters may not change these.

        Args:
            gate_up, down: the slices that the layers of this rank's experts consist of.
            module: name of the experts' module.
            num_experts: of all ranks.
        """
        first = self.own_slots(num_experts).start
        adapted_gate_up, adapted_down = (
            self.lora.add_experts(own, ExpertStack(module, name, num_experts, first))
            for own, name in ((gate_up, "gate_up_proj"), (down, "down_proj"))
        )
        if adapted_gate_up is adapted_down is UNCHANGED:
            return None
        return ExpertAdapters(self.lora, adapted_gate_up, adapted_down, len(gate_up))

    def norm(self, name: str, length: int, offset: float = 0.0) -> Tensor:
        """Read the weight of a norm and add the constant `offset`, which checkpoints leave out."""
        weight = self.replicated(f"{name}.weight", length)
        return weight.add_(offset) if offset else weight

    def shard(self, full_len: int, multiple: int = 1) -> Shard:
        """Return this rank's part of a dimension; parts are multiples of a length."""
        return Shard(self.comm.rank, self.comm.size, full_len, multiple)

    @property
    def expert_exchange(self) -> ExpertExchange:
        """Return the way of tokens to their experts."""
        return SumOfRanks(self.comm) if self.exchange is None else self.exchange

    def for_whole_networks(self) -> LoadContext:
        """Return the context of the networks that every token passes beside its experts."""
        if not self.expert_exchange.is_whole:
            return self
        return replace(self, comm=SingleRank(), tokens=LayerTokens.SENT, peers=None)

    def for_dense_networks(self) -> LoadContext:
        """Return the context of the networks of layers without experts."""
        return self.for_own_tokens() if self.expert_exchange.owns_tokens else self

    def own_slots(self, count: int) -> range:
        """Return this rank's slots of a mixture of so many experts."""
        num_slots = count + self.num_redundant_experts
        if not self.expert_parallel:
            return range(num_slots)
        return own_indices(self.comm.rank, self.comm.size, num_slots)

    def own_experts(self, count: int) -> list[int]:
        """Return the experts of which this rank loads weights, in the order of its slots."""
        placement = first_placement(count, count + self.num_redundant_experts)
        return [placement[slot] for slot in self.own_slots(count)]

    def expert_shard(self, intermediate_size: int) -> Shard:
        """Return this rank's part of the intermediate dimension of its experts."""
        if self.expert_parallel:
            return Shard(0, 1, intermediate_size)
        multiple = 1 if self.quantization is None else self.quantization.shard_multiple
        return self.shard(intermediate_size, multiple)

    def head_shard(self, num_heads: int, head_dim: int) -> Shard:
        """Return this rank's part of the outputs of attention heads; ranks share heads if there are fewer."""
        num_replicas = max(1, self.comm.size // num_heads)
        return Shard(self.comm.rank // num_replicas, self.comm.size // num_replicas, num_heads * head_dim)
