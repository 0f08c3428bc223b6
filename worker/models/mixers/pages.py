"""Pages: the layers of the cache that hold entries, vectors of several tokens each; see proto.model.entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ....proto.model.entries import HasEntries, num_pages, place_entries
from ...attention import LayerCache


@dataclass(frozen=True, slots=True)
class EntryCache:
    """The entries of a layer, or the keys of its indexer.

    Attributes:
        entries: [N, E, D], those in each block.
        group: index of the page's block tables.
    """

    entries: Tensor
    group: int


class Pages:
    """The places of all layers' entries in the last layers of the cache."""

    def __init__(self, mixers: Sequence[object]) -> None:
        self._mixers, self._num_pages = mixers, num_pages(mixers)
        self._bound: list[LayerCache] | None = None
        self.block_size = 0
        self.layers: list[list[EntryCache]] = []

    def bind(self, kv_caches: list[LayerCache]) -> None:
        """Find the entries in a cache, unless they are known."""
        if self._bound is kv_caches or not self._num_pages:
            return
        self._bound = kv_caches
        pages = kv_caches[len(kv_caches) - self._num_pages :]
        self.block_size = pages[0].blocks.shape[3]
        compressed = [mixer for mixer in self._mixers if isinstance(mixer, HasEntries)]
        self.layers = []
        for mixer, places in zip(compressed, place_entries(compressed, self.block_size), strict=True):
            own = []
            for place, dim in zip(places, mixer.compressed_dims(), strict=True):
                flat = pages[place.page].blocks.flatten(1)
                entries = flat.as_strided(
                    (len(flat), place.count, dim),
                    (flat.stride(0), place.stride, 1),
                    flat.storage_offset() + place.start,
                )
                own.append(EntryCache(entries, pages[place.page].group))
            self.layers.append(own)
