"""Device for tests of Triton kernels: a GPU if there is one, otherwise the CPU with Triton's interpreter.

Import this module before Triton, which reads TRITON_INTERPRET at import; quire itself imports Triton on GPUs only.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else pytest.param("cpu")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import fast_interpreter

    fast_interpreter.install()
