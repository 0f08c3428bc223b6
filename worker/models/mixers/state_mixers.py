"""The class of each kind of mixer that keeps a state."""

from __future__ import annotations

from ....proto.model.cca import CcaSpec
from ....proto.model.gated_delta import GatedDeltaSpec
from ....proto.model.kimi_delta import KimiDeltaSpec
from ....proto.model.lightning import LightningSpec
from ....proto.model.mamba1 import Mamba1Spec
from ....proto.model.mamba2 import Mamba2Spec
from ....proto.model.pooled import PooledKeysSpec
from ....proto.model.rg_lru import RgLruSpec
from ....proto.model.short_conv import ShortConvSpec
from ....proto.model.spec import DecoderSpec
from ..load_context import LoadContext
from .block_sparse import PooledKeysAttention
from .cca import CcaAttention
from .gated_delta import GatedDeltaNet
from .kimi_delta import KimiDeltaAttention
from .lightning import LightningAttention
from .mamba1 import Mamba1, Mamba1Heads
from .mamba2 import Mamba2, Mamba2BesideAttention
from .rg_lru import RgLru
from .short_conv import ShortConv
from .state_mixer import StateMixer


def make_state_mixer(load: LoadContext, spec: DecoderSpec, own: object, name: str) -> StateMixer:
    """Return the mixer of a spec that keeps a state."""
    match own:
        case CcaSpec():
            return CcaAttention(load, spec, own, name)
        case PooledKeysSpec():
            return PooledKeysAttention(load, spec, own, name)
        case ShortConvSpec():
            return ShortConv(load, spec, own, name)
        case GatedDeltaSpec():
            return GatedDeltaNet(load, spec, own, name)
        case Mamba2Spec():
            kind = Mamba2 if own.attention is None else Mamba2BesideAttention
            return kind(load, spec, own, name)
        case Mamba1Spec():
            return (Mamba1Heads if own.num_heads else Mamba1)(load, spec, own, name)
        case KimiDeltaSpec():
            return KimiDeltaAttention(load, spec, own, name)
        case LightningSpec():
            return LightningAttention(load, spec, own, name)
        case RgLruSpec():
            return RgLru(load, spec, own, name)
    raise TypeError(f"no mixer of {type(own).__name__}")
