"""A chain of drafted tokens in one call into C++ (native/draft_chain.cpp): a small network, sampling, and so on.

A network of one layer takes less time for a token than the calls of its ops from Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .decode_layers import DenseLayer, bind_caches, native_layer, native_linear
from .linear import Layout, PackedWeight, narrow
from .native import draft_chain as native
from .native import ops as cpu
from .native.decode_layers import Layer
from .native.library import dtype_codes, library

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HiddenInput:
    """The hidden states that a draft head reads beside the embeddings of tokens.

    Attributes:
        combination: [E, F], applied to the hidden states of the target model; None if they are read as they are.
        projection: [E, 2 E], applied to embedding and hidden state side by side; None if the attention of the one
            layer reads them so, and its norms before attention are these.
        embedding_norm, hidden_norm: [E], weights of the RMSNorm of each.
        is_hidden_first: of the two side by side.
        is_normed_residual: without a projection, the residual is the normalized hidden state.
    """

    combination: PackedWeight | None
    projection: PackedWeight | None
    embedding_norm: Tensor
    hidden_norm: Tensor
    is_hidden_first: bool = False
    is_normed_residual: bool = False


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """A network that drafts: token ids, and hidden states if it is a head, to hidden states to logits.

    Attributes:
        layers: as for DecodeLayers.
        rotary_tables: cosines and sines of all positions, [P, 2, R], by the layers' `rope` indices.
        embedding, output: [V, E] and [V', E].
        embedding_scale: multiplies every embedding.
        output_ids: [V'] int64, the token of each output; None if these are all V in order.
        vocab_size: V.
        last_norm: [E], weights of the RMSNorm before the output.
        feeds_normed: the next token reads hidden states after this norm.
        eps: of the norms.
        hidden_input: of a head; None for a model.
    """

    layers: Sequence[DenseLayer]
    rotary_tables: Sequence[Tensor]
    embedding: PackedWeight
    output: PackedWeight
    vocab_size: int
    last_norm: Tensor
    feeds_normed: bool
    eps: float
    embedding_scale: float = 1.0
    output_ids: Tensor | None = None
    hidden_input: HiddenInput | None = None

    def missing_op(self) -> str | None:
        """Return why the C++ op cannot compute the network. Returns None if it can."""
        reasons = [reason for layer in self.layers if (reason := layer.missing_op()) is not None]
        own = self.hidden_input
        weights = [self.output]
        if own is not None:
            weights += [weight for weight in (own.combination, own.projection) if weight is not None]
        if any(weight.matrix is None for weight in weights) or not self.embedding.can_embed:
            reasons.append("a weight is not packed")
        if self.embedding.layout is Layout.PLAIN and self.embedding.weight.dtype != self.last_norm.dtype:
            reasons.append(f"the embedding is in {self.embedding.weight.dtype}")
        if not cpu.supports(self.last_norm, len(self.last_norm)):
            reasons.append(f"rows of {len(self.last_norm)} numbers are not whole vectors")
        return reasons[0] if reasons else None

    def narrowed(self) -> DraftNetwork:
        """Return the network with float32 weights in bfloat16: a chain reads all of them for each token.

        Its results have the errors of bfloat16, which a drafted token may have. The embedding stays as it is.
        """
        own = self.hidden_input
        if own is not None:
            own = replace(own, combination=_narrow(own.combination), projection=_narrow(own.projection))
        layers = [
            replace(
                layer,
                qkv=narrow(layer.qkv),
                output=narrow(layer.output),
                gate_up=_narrow(layer.gate_up),
                down=_narrow(layer.down),
            )
            for layer in self.layers
        ]
        return replace(self, layers=layers, output=narrow(self.output), hidden_input=own)


def _narrow(weight: PackedWeight | None) -> PackedWeight | None:
    return None if weight is None else narrow(weight)


class DraftRows(NamedTuple):
    """Rows of the running sequences; their owner changes the numbers, and keeps the memory where it is.

    Attributes:
        token_ids: [R, L] int32; drafted tokens are written here.
        block_tables: [R, M] int32.
        greedy: [R] bool, rows that take the most likely token.
        temperature: [R] float32.
        top_k: [R] int64; V or more: off.
        top_p, min_p: [R] float32; above 1, and 0: off.
        seeds: [R] int64; with the position they determine the random numbers, as in kernels.gumbel.
    """

    token_ids: Tensor
    block_tables: Tensor
    greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    top_k: LongArray
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: LongArray


class KnownTokens(NamedTuple):
    """Known tokens of the rows that the network computes first.

    Attributes:
        counts: [n] int32, tokens of each row, at least 1.
        features: [., F], hidden states of the target model; None for a model.
        feature_index: [sum of counts] int64, those that belong to the tokens; None for a model.
    """

    counts: IntArray
    features: Tensor | None = None
    feature_index: LongArray | None = None


class DraftChain:
    """A DraftNetwork on one rank.

    Args:
        network: without a missing_op.
        token_offset: places by which the tokens of the network's inputs follow their positions: 1 for a head.
    """

    def __init__(self, network: DraftNetwork, token_offset: int) -> None:
        assert network.missing_op() is None
        native.check_layout()
        self._network = network  # keeps the memory alive
        self._token_offset = token_offset
        self._dtype = network.last_norm.dtype
        self._layers = (Layer * len(network.layers))(*map(native_layer, network.layers))
        self._ropes = (native.RotaryTable * len(network.rotary_tables))(
            *(native.RotaryTable(table.data_ptr(), table.shape[2]) for table in network.rotary_tables)
        )
        self._native = _native_network(network, self._layers, self._ropes)
        self._caches: Sequence[tuple[Tensor, Tensor | None]] = ()
        self._rows: tuple[DraftRows, native.Rows] | None = None
        # Rows, lens, limits and counts of a call's sequences, [4, R], and the addresses of the four: numpy takes 1 us
        # for the address of an array.
        self._sequences: IntArray = np.empty((4, 0), np.int32)
        self._addresses: list[int] = []

    def bind(self, caches: Sequence[tuple[Tensor, Tensor | None]], rows: DraftRows) -> None:
        """Set each layer's KV cache and scales, as DecodeLayers.bind does, and the rows."""
        assert rows.token_ids.dtype == rows.block_tables.dtype == torch.int32
        self._caches = caches
        bind_caches(self._layers, caches, self._dtype)
        native_rows = native.Rows(
            rows.token_ids.data_ptr(), rows.block_tables.data_ptr(), _address(rows.greedy, np.bool_),
            _address(rows.temperature, np.float32), _address(rows.top_k, np.int64), _address(rows.top_p, np.float32),
            _address(rows.min_p, np.float32), _address(rows.seeds, np.int64), rows.token_ids.stride(0),
            rows.block_tables.stride(0), caches[0][0].shape[3], self._token_offset,
        )  # fmt: skip
        self._rows = rows, native_rows
        self._sequences = np.empty((4, len(rows.token_ids)), np.int32)
        self._addresses = [_address(each, np.int32) for each in self._sequences]

    def draft(self, rows: LongArray, lens: IntArray, limits: IntArray, known: KnownTokens | Tensor) -> None:
        """Draft `limits` tokens of each row, none if that is 0, and write them from position `lens` on.

        Args:
            rows: [n] int64.
            lens, limits: [n] int32.
            known: tokens before these positions that the network computes first, or its hidden states of each row's
                last one, [n, E].
        """
        assert self._rows is not None, "call bind first"
        sequences = self._sequences[:, : len(rows)]
        sequences[0], sequences[1], sequences[2] = rows, lens, limits
        row_ids, own_lens, own_limits, counts = self._addresses
        features = index = hidden = None
        if isinstance(known, Tensor):
            assert known.shape == (len(rows), len(self._network.last_norm))
            hidden, own_counts = self._check(known), None
        else:
            sequences[3], own_counts = known.counts, counts
            if known.features is not None and known.feature_index is not None:
                features, index = self._check(known.features), _address(known.feature_index, np.int64)
        library().quire_draft(
            ctypes.addressof(self._native), ctypes.addressof(self._rows[1]), dtype_codes()[self._dtype], len(rows),
            row_ids, own_lens, own_limits, own_counts, features, index, hidden, torch.get_num_threads(),
        )  # fmt: skip

    def _check(self, states: Tensor) -> int:
        assert states.dtype == self._dtype
        assert states.is_contiguous()
        return states.data_ptr()


def _address(array: npt.NDArray[Any], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    return array.ctypes.data


def _native_network(network: DraftNetwork, layers: Any, ropes: Any) -> native.Network:
    own, embedding = network.hidden_input, network.embedding
    merge = native.Merge.EMBEDDING
    result = native.Network(
        output=native_linear(network.output.matrix),
        layers=ctypes.addressof(layers),
        ropes=ctypes.addressof(ropes),
        last_norm=network.last_norm.data_ptr(),
        output_ids=cpu.address_of(network.output_ids),
        num_layers=len(network.layers),
        num_ropes=len(network.rotary_tables),
        hidden_size=len(network.last_norm),
        vocab_size=network.vocab_size,
        feeds_normed=network.feeds_normed,
        eps=network.eps,
        embedding_scale=network.embedding_scale,
    )
    if embedding.layout is Layout.PLAIN:
        result.embedding_rows = embedding.weight.data_ptr()
    else:
        result.embedding = native_linear(embedding.matrix)
    if own is not None:
        merge = native.Merge.BESIDE if own.projection is None else native.Merge.PROJECTED
        result.embedding_norm, result.hidden_norm = own.embedding_norm.data_ptr(), own.hidden_norm.data_ptr()
        result.is_hidden_first, result.is_normed_residual = own.is_hidden_first, own.is_normed_residual
        if own.combination is not None:
            result.combination = native_linear(own.combination.matrix)
        if own.projection is not None:
            result.projection = native_linear(own.projection.matrix)
    result.merge = merge
    return result
