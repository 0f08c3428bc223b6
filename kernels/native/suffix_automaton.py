"""The suffix automaton in C++ (native/suffix_automaton.cpp)."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from .library import library

IntArray = npt.NDArray[np.int32]


class NativeSuffixAutomaton:
    """As kernels.suffix_automaton.SuffixAutomaton; call it only if the library is available."""

    def __init__(self) -> None:
        self._address = library().quire_suffix_create()
        weakref.finalize(self, library().quire_suffix_destroy, self._address)

    def extend(self, token_ids: IntArray) -> None:
        token_ids = np.ascontiguousarray(token_ids, np.int32)
        library().quire_suffix_extend(self._address, token_ids.ctypes.data, token_ids.size)

    def propose(self, count: int, min_len: int, max_len: int) -> tuple[IntArray, int]:
        out = np.empty(count, np.int32)
        match_len = library().quire_suffix_propose(self._address, count, min_len, max_len, out.ctypes.data)
        return out if match_len else out[:0], match_len
