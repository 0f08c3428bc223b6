"""Compiles an engine's kernels beside two starts, for a GPU that is not there: ``compile_at_start.py MODEL``.

Prints what each start logs.
"""

from __future__ import annotations

import logging
import sys

from quire.cluster.cli.compile import engine_of_gpu
from quire.cluster.config.engine_options import EngineOptions
from quire.worker.rank.start_compilation import CompileRequest, StartCompilation

CAPABILITY, GPU_BYTES = 90, 80 << 30


def main(model: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    config = engine_of_gpu(EngineOptions(model, max_num_seqs=4, cuda_graphs=False), GPU_BYTES)
    for _ in range(2):
        StartCompilation(CompileRequest(config, CAPABILITY, GPU_BYTES)).wait()


if __name__ == "__main__":
    main(sys.argv[1])
