"""Choice of the library that computes attention."""

from __future__ import annotations

import logging

from ..kernels.flash_attention import FlashAttention, load_flash_attention
from ..proto.errors import ConfigError, first_line

_log = logging.getLogger(__name__)


def load_chunk_attention(backend: str) -> FlashAttention | None:
    """Return another library's attention of chunks. Returns None for that of quire.

    Raises:
        ConfigError: the library is not installed.
    """
    if backend == "triton":
        return None
    try:
        attention = load_flash_attention()
    except ImportError as error:
        raise ConfigError(
            f"attention_backend is {backend!r}, but {first_line(error)}; install FlashAttention 3 or leave the "
            "option out"
        ) from error
    _log.info("attention of prompts is computed by FlashAttention 3")
    return attention
