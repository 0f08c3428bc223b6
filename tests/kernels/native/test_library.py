"""The constants that the library of C++ ops shares with Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels.native import library


@pytest.fixture(autouse=True)
def _available() -> Iterator[None]:
    if not library.is_available():
        pytest.skip("there is no C++ compiler")
    yield
    library.dtype_codes.cache_clear()


def test_library_names_every_dtype_of_caches_and_weights() -> None:
    codes = library.dtype_codes()
    quantized = {torch.int8, torch.float8_e4m3fn, torch.uint8, torch.float4_e2m1fn_x2}
    assert set(codes) == {torch.float32, torch.bfloat16, torch.float16} | quantized
    assert len(set(codes.values())) == len(codes)


def test_library_names_all_activations() -> None:
    assert set(library.gate_codes()) == {"silu", "gelu_tanh", "sigmoid", "tanh"}


def test_attention_kernels_have_whole_vectors() -> None:
    assert library.head_dims()
    assert all(head_dim % library.simd_lanes() == 0 for head_dim in library.head_dims())


def test_dtype_that_torch_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library.dtype_codes.cache_clear()
    monkeypatch.setattr(library, "constants", lambda: {"dtype.float5": 0})
    with pytest.raises(RuntimeError, match="has no dtype float5"):
        library.dtype_codes()
