"""The log of ops that PyTorch computes although there are C++ ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from quire.kernels.linear import pack
from quire.kernels.native import fallbacks
from quire.kernels.native.build import load_library
from quire.kernels.native.ops import supports_attention, supports_rows


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, log_of: Callable[[str], list[str]]) -> Iterator[list[str]]:
    """Return the list of the logged lines."""
    monkeypatch.setattr(fallbacks, "is_available", lambda: True)
    fallbacks.log_fallback.cache_clear()
    yield log_of(fallbacks.__name__)
    fallbacks.log_fallback.cache_clear()


def test_fallback_is_logged_once_per_reason(logged: list[str]) -> None:
    for reason in ("a", "b", "a"):
        fallbacks.log_fallback("norms", reason)
    assert logged == [f"INFO: PyTorch computes norms, which is slower: {reason}" for reason in "ab"]


def test_fallback_without_the_library_is_not_logged(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallbacks, "is_available", lambda: False)
    fallbacks.log_fallback("norms", "a")
    assert logged == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_every_width_are_packed(dtype: torch.dtype, logged: list[str]) -> None:
    if load_library() is None:
        pytest.skip("there is no C++ compiler")
    packed = pack(torch.zeros(16, 33, dtype=dtype))
    assert packed.matrix is not None or packed.padded is not None
    assert logged == []


def test_attention_without_an_op_is_logged(logged: list[str]) -> None:
    for _ in range(2):
        assert not supports_attention(torch.zeros(2, 4, 520), torch.zeros(9, 2, 2, 16, 520))
    reason = "there is no C++ op for a head_dim of 520, queries of torch.float32 and a cache of torch.float32"
    assert logged == [f"INFO: PyTorch computes attention, which is slower: {reason}"]


def test_latent_attention_without_an_op_is_logged(logged: list[str]) -> None:
    for _ in range(2):
        assert not supports_rows(torch.zeros(2, 4, 41), torch.zeros(9, 1, 1, 16, 41), 24)
    reason = (
        "there is no C++ op for latents of 41 numbers, queries of torch.float32 and a cache of torch.float32"
    )
    assert logged == [f"INFO: PyTorch computes latent attention, which is slower: {reason}"]


def test_ops_that_exist_are_not_logged(logged: list[str]) -> None:
    if load_library() is None:
        pytest.skip("there is no C++ compiler")
    assert pack(torch.zeros(16, 32)).matrix is not None
    assert supports_attention(torch.zeros(2, 4, 32), torch.zeros(9, 2, 2, 16, 32))
    assert supports_rows(torch.zeros(2, 4, 48), torch.zeros(9, 1, 1, 16, 64)[..., :48], 32)
    assert logged == []
