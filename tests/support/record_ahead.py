"""Prints the kernel variants that a rank needs, as `quire compile` finds them: ``record_ahead.py MODEL [FEATURE]``.

The engine is that of count_variants.py, whose variants must be the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from count_variants import CAPABILITY, FEATURES, NUM_BLOCKS, SETTINGS, load_worker_conftest

from quire.kernels import decode_splits
from quire.worker.ahead.variants import record_variants


def main(folder: Path, feature: str) -> None:
    worker = load_worker_conftest()
    decode_splits.NUM_EXTRA_ITEMS = 4
    config = worker.make_config(folder, 1, device="cuda", **SETTINGS, **FEATURES[feature](folder))
    for variant in record_variants(config.with_num_blocks(NUM_BLOCKS), [0], CAPABILITY, 1 << 30):
        print("variant", variant.name, json.loads(variant.data)["key"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or [""])
