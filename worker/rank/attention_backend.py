"""Choice of the library that computes attention, and the log of what computes it."""

from __future__ import annotations

import logging

from ...kernels.flash_attention import FlashAttention, load_flash_attention
from ...proto.errors import ConfigError, first_line

_log = logging.getLogger(__name__)


def load_chunk_attention(backend: str) -> FlashAttention | None:
    """Return another library's attention of chunks. Returns None for that of quire.

    Raises:
        ConfigError: the library is not installed.
    """
    if backend == "triton":
        return None
    try:
        return load_flash_attention()
    except ImportError as error:
        raise ConfigError(
            f"attention_backend is {backend!r}, but {first_line(error)}; install FlashAttention 3 or leave the "
            "option out"
        ) from error


def log_chunk_attention(attention: FlashAttention | None) -> None:
    """Log what computed the attention of prompts in the steps that have run so far, on every layer."""
    if attention is None:
        _log.info("attention of prompts: Triton kernels")
        return
    reason = ", ".join(sorted(attention.unsupported)) or "latents"
    if not attention.num_calls:
        _log.warning(
            "attention of prompts: Triton kernels, since FlashAttention 3 does not support %s", reason
        )
    elif attention.unsupported:
        _log.info("attention of prompts: FlashAttention 3; Triton kernels in layers with %s", reason)
    else:
        _log.info("attention of prompts: FlashAttention 3")
