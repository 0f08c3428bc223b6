"""Makes the benchmarks importable, which are no part of the package.

Some import Triton, which decides at that moment whether its kernels are interpreted: as the kernels' tests want it.
"""

import sys
from pathlib import Path

import triton_device  # noqa: F401

sys.path.append(str(Path(__file__).parents[2]))
