"""ZayaDecoder: layers with a scaled residual in float32, whose routers read what the router before has read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.linear import linear, pack
from ...kernels.norm import rms_norm
from ...proto.model.families.zaya import Zaya
from ...proto.model.spec import DecoderSpec, LayerSpec
from ..attention import AttentionInputs, LayerCache
from ..comm.expert_exchange import Dispatched
from ..weights.weight_slice import WeightSlice
from .aux_states import AuxStates
from .fused_decode import log_op_by_op
from .layers import Rotations
from .llama.decoder import Decoder
from .llama.decoder_layer import DecoderLayer, FeedForward
from .load_context import LoadContext
from .media_embeddings import MediaEmbeddings
from .moe.moe import WithExperts, read_experts
from .output_tokens import OutputTokens


def _vector(load: LoadContext, name: str, size: int) -> Tensor:
    out = torch.empty(size, dtype=torch.float32, device=load.device)
    load.checkpoint.read_into(out, name, (size,))
    return out


class ResidualScaling:
    """A sum of a residual and the result of a part of a layer, each with factors and addends of its numbers."""

    def __init__(self, load: LoadContext, name: str, size: int) -> None:
        names = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
        self._factors = [_vector(load, f"{name}.{own}", size) for own in names]

    def add(self, result: Tensor, residual: Tensor) -> Tensor:
        """[T, E] and [T, E] float32 -> [T, E] float32."""
        scale, bias, residual_scale, residual_bias = self._factors
        return (result.float() + bias) * scale + (residual + residual_bias) * residual_scale


class ZayaRouter:
    """Chooses one expert, or none, by a network that reads a sum over the layers; every rank holds it in full."""

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, own: Zaya, name: str, *, reads_before: bool
    ) -> None:
        assert spec.experts is not None
        self._num_experts, self._eps, size = spec.experts.count, spec.norm_eps, own.router_size
        layers = {"down_proj": (size, spec.hidden_size), "router_mlp.fc1": (size, size)}
        layers |= {"router_mlp.fc2": (size, size), "router_mlp.out_proj": (self._num_experts + 1, size)}
        self._weights = [
            pack(load.matrix(WeightSlice(f"{name}.{part}", shape, 0, 0, shape[0])))
            for part, shape in layers.items()
        ]
        self._biases = [load.replicated(f"{name}.{part}.bias", size) for part in list(layers)[:3]]
        self._before = load.replicated(f"{name}.router_states_scale", size) if reads_before else None
        self._norm = load.norm(f"{name}.router_mlp.norm", size)
        self._correction = _vector(load, f"{name}.balancing_biases", self._num_experts + 1)

    def choose(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights [T, 1] float32, expert ids [T, 1], and what the next router reads, [T, R].

        Args:
            x: [T, E].
            before: [T, R], what the router before has read; None in the first layer.
        """
        first, second, third, last = self._weights
        states = linear(x, first, self._biases[0])
        if before is not None and self._before is not None:
            states = states + before * self._before
        inner = rms_norm(states, self._norm, self._eps)
        inner = F.gelu(linear(inner, second, self._biases[1]))
        inner = F.gelu(linear(inner, third, self._biases[2]))
        scores = linear(inner, last).softmax(dim=-1)
        chosen = (scores.float() + self._correction).argmax(dim=-1, keepdim=True)
        is_none = chosen == self._num_experts
        weights = scores.gather(1, chosen).float().masked_fill(is_none, 0)
        return weights, chosen.masked_fill(is_none, 0), states


class ZayaMixture(WithExperts):
    """A mixture of experts with a ZayaRouter."""

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, own: Zaya, name: str, *, reads_before: bool
    ) -> None:
        assert spec.experts is not None
        self._comm, self._lora = load.comm, load.lora
        self._router = ZayaRouter(load, spec, own, f"{name}.gate", reads_before=reads_before)
        self.experts = read_experts(load, spec.experts, spec.hidden_size, spec.activation, name)

    def forward_routed(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the results, [T, E], and what the next router reads, [T, R]."""
        weights, expert_ids, states = self._router.choose(x, before)
        part = self.compute(Dispatched(x, weights, expert_ids, self._lora.step.token_slots))
        return self._comm.all_reduce(part), states

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E], without a router before."""
        return self.forward_routed(x, None)[0]


class ZayaLayer(DecoderLayer):
    """A layer with a scaled residual."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(load, spec, layer, name)
        self._after_attention, self._after_mlp = (
            ResidualScaling(load, f"{name}.post_{part}_residual_scale", spec.hidden_size)
            for part in ("attention", "mlp")
        )

    def make_mlp(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> FeedForward:
        """Return the feed-forward network of the layer `name`."""
        assert isinstance(spec.variant, Zaya)
        is_first = name.rpartition(".")[2] == "0"
        return ZayaMixture(load, spec, spec.variant, f"{name}.mlp", reads_before=not is_first)

    def forward_scaled(
        self,
        residual: Tensor,
        before: Tensor | None,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual, [T, E] float32, and what the next router reads, [T, R].

        Args:
            before: what this router reads besides; None in the first layer.
        """
        assert self.attention is not None
        assert isinstance(self.mlp, ZayaMixture)
        assert isinstance(self.before_attention, Tensor)
        assert isinstance(self.before_mlp, Tensor)
        normed = rms_norm(residual.to(self.before_attention.dtype), self.before_attention, self.norm_eps)
        attended = self.attention.forward(normed, rotations, kv_cache, inputs)
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        residual = self._after_attention.add(attended, residual)
        normed = rms_norm(residual.to(self.before_mlp.dtype), self.before_mlp, self.norm_eps)
        out, before = self.mlp.forward_routed(normed, before)
        return self._after_mlp.add(out, residual), before


class ZayaDecoder(Decoder):
    """A decoder of ZayaLayers."""

    layer_class = ZayaLayer
    reads_media = False

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        self._scale, self._bias = (
            _vector(load, f"model.input_hidden_states_{part}", spec.hidden_size) for part in ("scale", "bias")
        )
        super().__init__(load, spec, num_positions, has_head=has_head)
        self.supports_outputs = False

    def _plan_fused_decode(self, load: LoadContext) -> None:
        log_op_by_op(load.device, "its residual is scaled in float32")

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
        media: MediaEmbeddings | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, [T, E]."""
        assert media is None, "images are not read"
        assert aux is None, "the scaled residual has no hidden states for draft heads"
        assert outputs is None
        embedded = self.embedding.forward(token_ids)
        residual = (embedded.float() + self._bias) * self._scale
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {
            key: table.at(positions) for key, table in self.rotary.items()
        }
        before: Tensor | None = None
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, ZayaLayer)
            kv_cache = kv_caches[self.cached_by[index]]
            residual, before = layer.forward_scaled(residual, before, rotations, kv_cache, inputs)
        return self.layers[-1].add(None, residual.to(embedded.dtype), self.norm)
