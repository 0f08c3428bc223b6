"""FusedChain: drafts all tokens of a step in one native call, which saves a CPU the time of Python."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from torch import Tensor

from ...kernels.draft_chain import DraftChain, DraftNetwork, DraftRows, KnownTokens
from ...proto.block_tables import IntArray, RowArray
from ..attention import LayerCache
from ..models.drafts.draft_head import DraftHead
from ..models.loader import Model
from ..step.device_rows import DeviceRows

_log = logging.getLogger(__name__)


class FusedChain:
    """Drafts as `sample_drafts` does, except that rows whose top_k, top_p and min_p keep many tokens keep all.

    Args:
        layers: returns the network's KV cache, which is allocated later.
        token_offset: as for DraftChain.
    """

    def __init__(
        self,
        rows: DeviceRows,
        network: DraftNetwork,
        layers: Callable[[], list[LayerCache]],
        token_offset: int,
    ) -> None:
        self._rows, self._layers = rows, layers
        self._chain = DraftChain(network, token_offset)
        self._token_offset = np.int32(token_offset)
        self._caches: list[LayerCache] | None = None

    def continue_from(self, rows: RowArray, limits: IntArray, hidden: Tensor) -> None:
        """Draft tokens of rows whose known tokens are computed.

        Args:
            rows, limits: [n].
            hidden: [n, E], of the newest known token of each row.
        """
        self._draft(rows, self._rows.lens[rows], limits, hidden.contiguous())

    def compute_and_draft(
        self,
        rows: RowArray,
        ends: IntArray,
        counts: IntArray,
        limits: IntArray,
        features: Tensor | None = None,
        feature_index: RowArray | None = None,
    ) -> None:
        """Compute tokens of distinct rows, and draft.

        Args:
            rows: [n].
            ends, counts: [n] int32, end of the positions of each row's tokens, and their number.
            limits: [n] int32, at least 1 for rows whose tokens are the last known ones, and 0 for others.
            features, feature_index: as for KnownTokens.
        """
        known = KnownTokens(counts, features, feature_index)
        self._draft(rows, ends + self._token_offset, limits, known)

    def _draft(self, rows: RowArray, lens: IntArray, limits: IntArray, known: KnownTokens | Tensor) -> None:
        caches = self._layers()
        if caches is not self._caches:
            self._bind(caches)
        self._chain.draft(rows, lens, limits, known)

    def _bind(self, caches: list[LayerCache]) -> None:
        rows, sampling = self._rows, self._rows.sampling
        own = DraftRows(
            rows.token_ids,
            rows.device_tables.ids,
            sampling.greedy,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
        )
        self._chain.bind([(cache.blocks, cache.scales) for cache in caches], own)
        self._caches = caches


def plan_fused_chain(
    rows: DeviceRows,
    model: Model | DraftHead,
    layers: Callable[[], list[LayerCache]],
    token_offset: int,
    *,
    narrows: bool = False,
) -> FusedChain | None:
    """Return a FusedChain. Returns None, and logs why on a CPU, if the native ops do not support the model.

    Args:
        narrows: it has copies of float32 weights in bfloat16, with which it takes less time.
    """
    if not rows.token_ids.is_cpu:
        return None
    network = model.to_draft_network()
    missing = "it is not a dense decoder on one rank" if network is None else network.missing_op()
    if network is None or missing is not None:
        _log.info("drafts are computed op by op, which is slower with few sequences: %s", missing)
        return None
    return FusedChain(rows, network.narrowed() if narrows else network, layers, token_offset)
