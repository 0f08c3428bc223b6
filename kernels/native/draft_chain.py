"""The structs of quire_draft (native/draft_chain.cpp): the same fields in the same order."""

from __future__ import annotations

import ctypes
import enum

from .decode_layers import Linear
from .library import library


class Merge(enum.IntEnum):
    """Ways in which a network combines the embedding of a token with a hidden state; see native/draft_chain.cpp."""

    EMBEDDING = 0
    BESIDE = 1
    PROJECTED = 2


class RotaryTable(ctypes.Structure):
    """Cosines and sines of all positions."""

    _fields_ = [("data", ctypes.c_void_p), ("rotated_dim", ctypes.c_int64)]


class Network(ctypes.Structure):
    """A network that drafts: weights and settings."""

    _fields_ = [
        *((name, Linear) for name in ("combination", "embedding", "projection", "output")),
        *((name, ctypes.c_void_p) for name in ("embedding_rows", "layers", "ropes")),
        *((name, ctypes.c_void_p) for name in ("embedding_norm", "hidden_norm", "last_norm", "output_ids")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_ropes", "hidden_size", "vocab_size")),
        *((name, ctypes.c_int64) for name in ("merge", "is_hidden_first", "is_normed_residual")),
        *((name, ctypes.c_int64) for name in ("feeds_normed",)),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale")),
    ]


class Rows(ctypes.Structure):
    """Rows of the running sequences, and their sampling parameters."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("token_ids", "block_tables", "greedy", "temperature", "top_k")
        ),
        *((name, ctypes.c_void_p) for name in ("top_p", "min_p", "seeds")),
        *((name, ctypes.c_int64) for name in ("token_stride", "table_stride", "block_size", "token_offset")),
    ]


def check_layout() -> None:
    """Check that Python and C++ agree on the size of a network.

    Raises:
        RuntimeError: they do not.
    """
    expected, size = library().quire_draft_network_bytes(), ctypes.sizeof(Network)
    if size != expected:
        raise RuntimeError(
            f"struct Network has {expected} bytes in native/draft_chain.cpp and {size} in native/draft_chain.py"
        )
