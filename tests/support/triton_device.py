"""Where Triton kernels are tested: on a GPU if there is one, otherwise on a CPU in Triton's interpreter.

To be imported before anything imports Triton, which looks at its environment then; quire imports it on GPUs alone.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else pytest.param("cpu")
