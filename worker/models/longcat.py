"""LongcatDecoder: pairs of layers with a mixture of experts beside the second (LongCat-Flash, 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...proto.model.spec import DecoderSpec, LayerSpec
from .layers import PartialSum
from .llama.decoder import Decoder
from .llama.decoder_layer import DecoderLayer
from .load_context import LoadContext
from .moe.moe import MixtureOfExperts


@dataclass(slots=True)
class Shortcut:
    """The mixture of a pair of layers.

    Attributes:
        result: of the current step, between the first layer and the end of the second one.
    """

    mixture: MixtureOfExperts
    result: Tensor | None = None


class FirstLayer(DecoderLayer):
    """The first layer of a pair, which computes the mixture too."""

    shortcut: Shortcut

    def _feed_forward(self, x: Tensor | PartialSum | None, residual: Tensor) -> Tensor | PartialSum:
        assert self.mlp is not None
        normed = self.add(x, residual, self.before_mlp)
        self.shortcut.result = self.shortcut.mixture.forward(normed)
        return self.mlp.forward(normed)


class SecondLayer(DecoderLayer):
    """The second layer of a pair, which adds the result of the mixture to its own."""

    shortcut: Shortcut

    def _feed_forward(self, x: Tensor | PartialSum | None, residual: Tensor) -> Tensor | PartialSum:
        out, result = super()._feed_forward(x, residual), self.shortcut.result
        assert isinstance(out, Tensor)  # without peers no sum is deferred
        assert result is not None
        self.shortcut.result = None
        return out.add_(result)


class LongcatDecoder(Decoder):
    """A decoder of such pairs."""

    def make_layers(self, load: LoadContext, spec: DecoderSpec) -> list[DecoderLayer]:
        load, layers = replace(load, peers=None), list[DecoderLayer]()
        for index in range(0, len(spec.layers), 2):
            name, (first, second) = f"{spec.names.layers}.{index // 2}", spec.layers[index : index + 2]
            layers += self._make_pair(load, spec, (first, second), name)
        return layers

    def _make_pair(
        self, load: LoadContext, spec: DecoderSpec, pair: tuple[LayerSpec, LayerSpec], name: str
    ) -> tuple[DecoderLayer, DecoderLayer]:
        assert spec.experts is not None
        shortcut = Shortcut(MixtureOfExperts(load, spec.experts, spec.hidden_size, spec.activation, name))
        first, second = (
            FirstLayer(load, spec, pair[0], f"{name}.0"),
            SecondLayer(load, spec, pair[1], f"{name}.1"),
        )
        first.shortcut = second.shortcut = shortcut
        return first, second

    def _networks(self) -> list[object]:
        return [layer.shortcut.mixture for layer in self.layers if isinstance(layer, FirstLayer)]
