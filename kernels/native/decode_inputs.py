"""The struct of quire_gather_decodes (native/decode_inputs.cpp): the same fields in the same order."""

from __future__ import annotations

import ctypes


class RowTables(ctypes.Structure):
    """Tokens and block tables of rows."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("token_ids", "lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("token_stride", "table_stride", "block_size")),
    ]
