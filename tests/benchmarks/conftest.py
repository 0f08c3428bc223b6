"""Makes the benchmarks importable, which are not part of the package.

triton_device comes first: Triton decides at import whether kernels are interpreted, and some benchmarks import it.
"""

import sys
from pathlib import Path

import triton_device  # noqa: F401

sys.path.append(str(Path(__file__).parents[2]))
