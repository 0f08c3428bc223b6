"""ZambaDecoder: layers of Mamba or Mamba 2, before some of which a shared block is computed."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.norm import rms_norm
from ...kernels.quantized_linear import Float8Tokens
from ...proto.model.families.zamba import Zamba
from ...proto.model.mamba1 import Mamba1Spec
from ...proto.model.mamba2 import Mamba2Spec
from ...proto.model.spec import DecoderSpec, LayerSpec
from ..attention import AttentionInputs, LayerCache
from ..comm.shard import Shard
from .layers import ColumnParallelLinear, PartialSum, Projection, Rotations, RowParallelLinear
from .llama.decoder import Decoder
from .llama.decoder_layer import DecoderLayer
from .load_context import LoadContext
from .media_embeddings import MediaEmbeddings
from .mixers.attention import Attention
from .mixers.state_mixer import StateMixer

# Key of Rotations |-> the embedded tokens, [T, E], which every block reads.
_EMBEDDED = "embedded"


class LowRankUpdate:
    """A low-rank addend of a linear layer, ``up(down(x))``, that one use of a shared block has.

    Args:
        name: of the list of adapters, with the index of the use.
        outputs: this rank's parts of the layer's outputs, with their first ones.
        num_outputs: of the whole layer.
    """

    def __init__(
        self,
        load: LoadContext,
        name: str,
        in_features: int,
        rank: int,
        outputs: list[tuple[int, Shard]],
        num_outputs: int,
    ) -> None:
        down = Projection(f"{name}.0", Shard(0, 1, rank))
        self.down = ColumnParallelLinear(load, [down], in_features, bias=False)
        up = [Projection(f"{name}.1", shard, start, num_outputs) for start, shard in outputs]
        self.up = ColumnParallelLinear(load, up, rank, bias=False)

    def forward(self, x: Tensor | Float8Tokens) -> Tensor:
        """[T, E] -> [T, this rank's outputs]."""
        return self.up.forward(self.down.forward(x))


class AdaptedLinear:
    """A linear layer of a shared block with the addends of one use of it."""

    accepts_float8 = False

    def __init__(self, shared: ColumnParallelLinear, updates: list[LowRankUpdate]) -> None:
        self._shared, self._updates = shared, updates
        self.weight, self.bias, self.lora = shared.weight, shared.bias, shared.lora

    def forward(self, x: Tensor | Float8Tokens) -> Tensor:
        """[T, E] -> [T, this rank's outputs]."""
        y = self._shared.forward(x)
        return (
            y.add_(torch.cat([update.forward(x) for update in self._updates], dim=1)) if self._updates else y
        )


class SharedBlock:
    """Attention and feed-forward network over a layer's input and the embedded tokens.

    Args:
        name: of the block in the checkpoint.
        use: index of this use of it among the layers with blocks.
        shared: block |-> its first use, whose weights this one has, too.
    """

    def __init__(
        self,
        load: LoadContext,
        spec: DecoderSpec,
        mixer: Mamba1Spec | Mamba2Spec,
        name: str,
        use: int,
        shared: dict[str, SharedBlock],
    ) -> None:
        variant, own, size = spec.variant, mixer.attention, spec.hidden_size
        assert isinstance(variant, Zamba)
        assert own is not None
        self.eps, inner = spec.norm_eps, variant.intermediate_size
        half = load.shard(inner)
        first = shared.get(name)
        if first is None:
            self.norm = load.norm(f"{name}.input_layernorm", 2 * size)
            self.before_mlp = load.norm(f"{name}.pre_ff_layernorm", size)
            self.attention = Attention(load, spec, own, f"{name}.self_attn", in_features=2 * size)
            self.qkv = self.attention.qkv
            network = f"{name}.feed_forward"
            projections = [
                Projection(f"{network}.gate_up_proj", half, start, 2 * inner)
                if variant.fused_gate_up
                else Projection(f"{network}.{part}_proj", half)
                for part, start in (("gate", 0), ("up", inner))
            ]
            self.gate_up = ColumnParallelLinear(load, projections, size, variant.bias)
            self.down = RowParallelLinear(load, f"{network}.down_proj", inner, size, variant.bias)
            shared[name] = self
        else:
            self.norm, self.before_mlp, self.attention = first.norm, first.before_mlp, first.attention
            self.qkv, self.gate_up, self.down = first.qkv, first.gate_up, first.down
        updates: list[LowRankUpdate] = []
        if variant.adapts_attention:
            counts = {"q": own.num_heads, "k": own.num_kv_heads, "v": own.num_kv_heads}
            updates = [
                LowRankUpdate(
                    load,
                    f"{name}.self_attn.linear_{part}_adapter_list.{use}",
                    2 * size,
                    variant.adapter_rank,
                    [(0, load.head_shard(count, own.head_dim))],
                    count * own.head_dim,
                )
                for part, count in counts.items()
            ]
        self._adapted_qkv = AdaptedLinear(self.qkv, updates)
        updates = []
        if variant.adapter_rank:
            update = LowRankUpdate(
                load,
                f"{name}.feed_forward.gate_up_proj_adapter_list.{use}",
                size,
                variant.adapter_rank,
                [(0, half), (inner, half)],
                2 * inner,
            )
            updates = [update]
        self._adapted_gate_up = AdaptedLinear(self.gate_up, updates)

    def forward(
        self, x: Tensor, rotations: Rotations, kv_cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """[T, 2 E] -> [T, E]."""
        normed = rms_norm(x, self.norm, self.eps)
        attended = self.attention.forward_projected(
            self._adapted_qkv.forward(normed), rotations, kv_cache, inputs
        )
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        gate_up = self._adapted_gate_up.forward(rms_norm(attended, self.before_mlp, self.eps))
        gate, up = gate_up.chunk(2, dim=1)
        return self.down.forward(F.gelu(gate) * up)


class ZambaLayer(DecoderLayer):
    """Mamba, whose input may have the result of a shared block added to it."""

    def __init__(
        self,
        load: LoadContext,
        spec: DecoderSpec,
        layer: LayerSpec,
        name: str,
        shared: dict[str, SharedBlock],
    ) -> None:
        variant, index = spec.variant, int(name.rpartition(".")[2])
        assert isinstance(variant, Zamba)
        assert isinstance(layer.mixer, Mamba1Spec | Mamba2Spec)
        load = replace(load, peers=None)  # a block needs the sum itself
        alone = replace(layer, mixer=replace(layer.mixer, attention=None))
        self.block: SharedBlock | None = None
        if index not in variant.sources:
            super().__init__(load, spec, alone, name)
            return
        super().__init__(load, spec, alone, f"{name}.mamba_decoder")
        size, source = spec.hidden_size, variant.sources[index]
        use = list(variant.sources).index(index)
        stored = f"{spec.names.layers}.{source}.{variant.block_name}"
        self.block = SharedBlock(load, spec, layer.mixer, stored, use, shared)
        self.linear = ColumnParallelLinear(
            load, [Projection(f"{name}.linear", Shard(0, 1, size))], size, bias=False
        )
        # Some checkpoints store a block with each layer that uses it.
        if source != index:
            for tensor in load.checkpoint.names():
                if tensor.startswith(f"{name}.{variant.block_name}."):
                    load.checkpoint.ignore(tensor)

    def forward(
        self,
        x: Tensor | PartialSum | None,
        residual: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor | PartialSum | None:
        """As DecoderLayer."""
        if self.block is None:
            return super().forward(x, residual, rotations, kv_cache, inputs)
        assert isinstance(self.before_attention, Tensor)
        assert isinstance(self.attention, StateMixer)
        hidden, embedded = self.add(x, residual, None), rotations[_EMBEDDED][0]
        assert embedded is not None
        shared = self.block.forward(torch.cat((hidden, embedded), dim=1), rotations, kv_cache, inputs)
        normed = rms_norm(hidden + self.linear.forward(shared), self.before_attention, self.norm_eps)
        return self.attention.forward(normed, rotations, kv_cache, inputs)


class ZambaDecoder(Decoder):
    """A decoder whose blocks of attention are shared."""

    def make_layers(self, load: LoadContext, spec: DecoderSpec) -> list[DecoderLayer]:
        """Return the layers."""
        shared = dict[str, SharedBlock]()
        return [
            ZambaLayer(load, spec, layer, f"{spec.names.layers}.{index}", shared)
            for index, layer in enumerate(spec.layers)
        ]

    def other_inputs(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, media: MediaEmbeddings | None
    ) -> Rotations:
        """Return the embedded tokens, which the residual is added to in place."""
        return {_EMBEDDED: (hidden.clone(), None)}
