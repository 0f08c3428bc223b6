"""Layers of Gemma 3n: several streams of the residual, of which each layer computes one (Baykal et al., *Alternating
Updates for Efficient Transformers*, 2023), a low-rank addend of attention (LAuReL), and sparse activations."""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.activation import GATED_ACTIVATIONS
from ....kernels.norm import rms_norm
from ....proto.model.spec import AltUp, DecoderSpec, LayerSpec
from ...attention import AttentionInputs, LayerCache
from ..layers import Rotations
from ..load_context import LoadContext
from ..mlp import Mlp
from .per_layer_inputs import InputGate, whole_linear
from .self_attention import Attention
from .shared_attention import SharedAttention

_SQRT_HALF = 2**-0.5


class StreamMixer:
    """Predicts all streams before a layer, and corrects them by the stream that the layer has computed."""

    def __init__(self, load: LoadContext, spec: DecoderSpec, altup: AltUp, name: str) -> None:
        count, size = altup.num_streams, spec.hidden_size
        self._active, self._eps = altup.active, spec.norm_eps
        self._norm = load.norm(f"{name}.router_norm", size).mul_(1 / size)
        self._router = load.replicated(f"{name}.modality_router.weight", count, size)
        self._prediction = load.replicated(f"{name}.prediction_coefs.weight", count * count, count)
        self._correction = load.replicated(f"{name}.correction_coefs.weight", count, count)
        self._output_scale: Tensor | None = load.replicated(f"{name}.correct_output_scale", size)
        if not altup.scales_output:
            self._output_scale = None

    def predict(self, streams: Tensor) -> Tensor:
        """[T, N, E] -> [T, N, E]."""
        factors = F.linear(self._modalities(streams[:, self._active]), self._prediction)
        return torch.baddbmm(streams, factors.unflatten(1, streams.shape[1:2] * 2), streams)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Return the corrected streams.

        Args:
            predicted: [T, N, E].
            computed: [T, E], the active stream after the layer.
        """
        factors = F.linear(self._modalities(computed), self._correction) + 1
        innovation = computed - predicted[:, self._active]
        return predicted + factors.unsqueeze(2) * innovation.unsqueeze(1)

    def output(self, corrected: Tensor) -> Tensor:
        """Return the active stream as the layer's inputs are gated by, [T, E]."""
        active = corrected[:, self._active]
        return active.contiguous() if self._output_scale is None else active * self._output_scale

    def _modalities(self, active: Tensor) -> Tensor:
        routed = F.linear(rms_norm(active.contiguous(), self._norm, self._eps), self._router)
        return routed.float().tanh().to(active.dtype)


class SparseMlp:
    """Gated feed-forward network in which only the largest gates of a token are not 0.

    Args:
        sparsity: share of the gates that are 0, if they are normally distributed; 0 for a dense network.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, name: str, sparsity: float) -> None:
        self._comm, self._length = load.comm, spec.intermediate_size
        self._mlp = Mlp(load, spec, name, None)
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

    def _mean(self, numbers: Tensor) -> Tensor:
        """Return the mean over the numbers of all ranks: [T, I] -> [T, 1]."""
        return self._comm.all_reduce(numbers.sum(dim=-1, keepdim=True)) / self._length


class AltUpLayer:
    """Attention and feed-forward network of one stream.

    Args:
        index: of the layer.
    """

    def __init__(self, load: LoadContext, spec: DecoderSpec, altup: AltUp, index: int, name: str) -> None:
        layer: LayerSpec = spec.layers[index]
        spec = spec.of_layer(layer)
        assert spec.per_layer_inputs is not None

        def norm(own_name: str) -> Tensor:
            return load.norm(f"{name}.{own_name}", spec.hidden_size, spec.norm_offset)

        self._eps = spec.norm_eps
        self._active = altup.active
        self._mixer = StreamMixer(load, spec, altup, f"{name}.altup")
        self._before_attention, self._after_attention = (
            norm("input_layernorm"),
            norm("post_attention_layernorm"),
        )
        self._before_mlp, self._after_mlp = (
            norm("pre_feedforward_layernorm"),
            norm("post_feedforward_layernorm"),
        )
        make_attention = Attention if layer.kv_source is None else SharedAttention
        self._attention = make_attention(load, spec, layer, f"{name}.self_attn", None)
        self._mlp = SparseMlp(load, spec, f"{name}.mlp", altup.sparsities[index])
        rank, size = altup.laurel_rank, spec.hidden_size
        self._laurel_down = whole_linear(load, f"{name}.laurel.linear_left", rank, size)
        self._laurel_up = whole_linear(load, f"{name}.laurel.linear_right", size, rank)
        self._after_laurel = norm("laurel.post_laurel_norm")
        self._gate = InputGate(load, spec, spec.per_layer_inputs, name)

    def forward(
        self,
        streams: Tensor,
        rotations: Rotations,
        kv_cache: LayerCache,
        inputs: AttentionInputs,
        layer_inputs: Tensor,
    ) -> Tensor:
        """[T, N, E] and the layer's inputs [T, P] -> [T, N, E]."""
        predicted = self._mixer.predict(streams)
        active = predicted[:, self._active]
        normed = self._norm(active.contiguous(), self._before_attention)
        low_rank = self._laurel_up.multiply(self._laurel_down.multiply(normed))
        attended = self._attention.forward(normed, rotations, kv_cache, inputs)
        assert isinstance(attended, Tensor)  # without peers no sum is deferred
        hidden = active + self._norm(attended, self._after_attention)
        hidden = (hidden + normed + self._norm(low_rank, self._after_laurel)) * _SQRT_HALF
        hidden = hidden + self._norm(self._mlp.forward(self._norm(hidden, self._before_mlp)), self._after_mlp)
        corrected = self._mixer.correct(predicted, hidden)
        corrected[:, 1:] += self._gate.forward(self._mixer.output(corrected), layer_inputs).unsqueeze(1)
        return corrected

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)
