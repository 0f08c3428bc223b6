"""Gemma 3n: several streams of the residual, of which each layer computes one (Baykal et al., *Alternating
Updates for Efficient Transformers*, 2023), a low-rank addend of attention (LAuReL), and sparse activations."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import GATED_ACTIVATIONS, tanh
from ....kernels.linear import linear, pack
from ....kernels.norm import rms_norm
from ....proto.model.families.gemma import Gemma3n
from ....proto.model.spec import DecoderSpec, LayerSpec, MlpSpec
from ...attention import AttentionInputs, LayerCache
from ...weights.linear_weight import LinearWeight
from ..aux_states import AuxStates
from ..fused_decode import log_op_by_op
from ..layers import Rotations
from ..llama.decoder import Decoder
from ..llama.decoder_layer import FeedForward
from ..load_context import LoadContext
from ..media_embeddings import MediaEmbeddings
from ..mlp import Mlp
from ..output_tokens import OutputTokens
from .shared import GemmaLayer, InputGate, PerLayerEmbedding, whole_linear

_SQRT_HALF = 2**-0.5
# The least mean square that a stream is scaled by.
_MIN_SQUARE = 1e-5


class StreamMixer:
    """Predicts all streams before a layer, and corrects them by the stream that the layer has computed."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, altup: Gemma3n, name: str) -> None:
        count, size = altup.num_streams, spec.hidden_size
        self._active, self._eps = altup.active, spec.norm_eps
        self._norm = load.norm(f"{name}.router_norm", size).mul_(1 / size)
        self._router = pack(load.replicated(f"{name}.modality_router.weight", count, size))
        self._prediction = pack(load.replicated(f"{name}.prediction_coefs.weight", count * count, count))
        self._correction = pack(load.replicated(f"{name}.correction_coefs.weight", count, count))
        self._output_scale: Tensor | None = load.replicated(f"{name}.correct_output_scale", size)
        if not altup.scales_output:
            self._output_scale = None

    def predict(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, N, E]."""
        factors = linear(self._modalities(streams[:, self._active]), self._prediction)
        factors = factors.unflatten(1, streams.shape[1:2] * 2)
        if not streams.is_cpu:
            return torch.baddbmm(streams, factors, streams)
        # Addend by addend: the sums of a batched product on a CPU depend on the number of tokens.
        addends = streams.float()
        predicted = addends
        for index in range(streams.shape[1]):
            predicted = predicted + factors[:, :, index, None].float() * addends[:, None, index]
        return predicted.to(streams.dtype)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Return the corrected streams.

        Args:
            predicted: [T, N, E].
            computed: [T, E], the active stream after the layer.
        """
        factors = linear(self._modalities(computed), self._correction) + 1
        innovation = computed - predicted[:, self._active]
        return predicted + factors.unsqueeze(2) * innovation.unsqueeze(1)

    def output(self, corrected: Tensor) -> Tensor:
        """Return the active stream as the layer's inputs are gated by, [T, E]."""
        active = corrected[:, self._active]
        return active.contiguous() if self._output_scale is None else active * self._output_scale

    def _modalities(self, active: Tensor) -> Tensor:
        routed = linear(rms_norm(active.contiguous(), self._norm, self._eps), self._router)
        return tanh(routed.float()).to(active.dtype)


class SparseMlp:
    """Gated feed-forward network in which only the largest gates of a token are not 0.

    Args:
        sparsity: share of the gates that are 0, if they are normally distributed; 0 for a dense network.
    """

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, own: MlpSpec, name: str, sparsity: float
    ) -> None:
        self._comm, self._length = load.comm, own.intermediate_size
        self._mlp = Mlp(load, spec, own, name)
        self._deviations = statistics.NormalDist().inv_cdf(sparsity) if sparsity else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        if self._deviations is None:
            y = self._mlp.forward(x)
            assert isinstance(y, Tensor)  # without peers no sum is deferred
            return y
        gate, up = self._mlp.gate_up.forward(x).chunk(2, dim=-1)
        gates = gate.float()
        mean = self._mean(gates)
        cutoff = mean + self._deviations * self._mean((gates - mean).square()).sqrt()
        gate = F.relu(gates - cutoff).to(x.dtype)
        return self._mlp.down.forward(GATED_ACTIVATIONS[self._mlp.activation](torch.cat((gate, up), dim=-1)))

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean over the elements of all ranks: [T, I] -> [T, 1]."""
        return self._comm.all_reduce(x.sum(dim=-1, keepdim=True)) / self._length


class Gemma3nLayer(GemmaLayer):
    """Attention and feed-forward network of one stream."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__(load, spec, layer, name)
        own, size = _own(spec), spec.hidden_size
        self._active = own.active
        self._mixer = StreamMixer(load, spec, own, f"{name}.altup")
        self._laurel_down = whole_linear(load, f"{name}.laurel.linear_left", own.laurel_rank, size)
        self._laurel_up = whole_linear(load, f"{name}.laurel.linear_right", size, own.laurel_rank)
        self._after_laurel = load.norm(f"{name}.laurel.post_laurel_norm", size)
        self._gate = InputGate(load, spec, own.inputs, name)

    def make_mlp(self, load: LoadContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> FeedForward:
        assert layer.mlp is not None
        return SparseMlp(load, spec, layer.mlp, f"{name}.mlp", _own(spec).sparsities[self.index])

    def forward_streams(
        self,
        streams: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        layer_inputs: Tensor,
    ) -> Tensor:
        """[T, N, E] and the layer's inputs [T, P] -> [T, N, E]."""
        assert self.attention is not None
        assert self.mlp is not None
        predicted = self._mixer.predict(streams)
        active = predicted[:, self._active]
        normed = self.add(None, active.contiguous(), self.before_attention)
        low_rank = self._laurel_up.multiply(self._laurel_down.multiply(normed))
        attended = self._finish(
            self.attention.forward(normed, rotations, kv_cache, inputs), self.after_attention
        )
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        low_rank = rms_norm(low_rank, self._after_laurel, self.norm_eps)
        hidden = (active + attended + normed + low_rank) * _SQRT_HALF
        computed = self._finish(self.mlp.forward(self.add(None, hidden, self.before_mlp)), self.after_mlp)
        assert isinstance(computed, Tensor)
        hidden = hidden + computed
        corrected = self._mixer.correct(predicted, hidden)
        corrected[:, 1:] += self._gate.forward(self._mixer.output(corrected), layer_inputs).unsqueeze(1)
        return corrected


class Gemma3nDecoder(Decoder):
    """A decoder of Gemma3nLayers."""

    layer_class = Gemma3nLayer

    def __init__(
        self, load: LoadContext, spec: DecoderSpec, num_positions: int, *, has_head: bool = True
    ) -> None:
        own = _own(spec)
        self._layer_inputs = PerLayerEmbedding(load, spec, own.inputs)
        self._expansions = _read_projections(load, spec, own, "model.altup_projections")
        self._reductions = _read_projections(load, spec, own, "model.altup_unembed_projections")
        self._eps = spec.norm_eps
        super().__init__(load, spec, num_positions, has_head=has_head)
        self.supports_outputs = False

    def _plan_fused_decode(self, load: LoadContext) -> None:
        log_op_by_op(load.device, "its residual has several streams")

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
        assert media is None, "images of Gemma 3n are not read"
        assert aux is None, "the streams of Gemma 3n have no hidden states for draft heads"
        assert outputs is None
        embedded = self.embedding.forward(token_ids)
        layer_inputs = self._layer_inputs.forward(token_ids, embedded)
        rotations: dict[str | None, tuple[Tensor | None, Tensor | None]] = {
            key: table.at(positions) for key, table in self.rotary.items()
        }
        expanded = [_scale_like(own.multiply(embedded), embedded) for own in self._expansions]
        streams = torch.stack((embedded, *expanded), dim=1)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma3nLayer)
            kv_cache, own_inputs = kv_caches[self.cached_by[index]], layer_inputs[:, index]
            streams = layer.forward_streams(streams, rotations, kv_cache, inputs, own_inputs)
        first, *others = streams.unbind(1)
        reduced = [
            _scale_like(own.multiply(stream.contiguous()), first)
            for own, stream in zip(self._reductions, others, strict=True)
        ]
        assert isinstance(self.norm, Tensor)
        return rms_norm(torch.stack((first, *reduced)).mean(dim=0), self.norm, self._eps)


def _own(spec: DecoderSpec) -> Gemma3n:
    assert isinstance(spec.variant, Gemma3n)
    return spec.variant


def _read_projections(load: LoadContext, spec: DecoderSpec, altup: Gemma3n, name: str) -> list[LinearWeight]:
    """Read the matrices between the hidden state and the streams but the first."""
    size = spec.hidden_size
    return [whole_linear(load, f"{name}.{index}", size, size) for index in range(altup.num_streams - 1)]


def _scale_like(x: Tensor, like: Tensor) -> Tensor:
    """Scale x, [T, E], to the mean square of `like`."""
    square = x.square().mean(dim=-1, keepdim=True).clamp_(min=_MIN_SQUARE)
    return x * like.square().mean(dim=-1, keepdim=True).sqrt() / square.sqrt()
