"""The experts of a mixture on a CPU: all in one C++ call, beside the same experts one by one.

    python -m benchmarks.experts [--quick] --json benchmarks/results/experts.json

- experts.<mixture>.<dtype>.<rows>.one_call and .one_by_one: ms per layer for that many tokens, without the router.
  The calls alternate and have the same weights. qwen3 has the sizes of a layer of Qwen3-30B-A3B, but 32 of its 128
  experts.
"""

from __future__ import annotations

import time
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.common import Figure, make_parser, median, report
from quire.kernels.activation import GatedActivation
from quire.kernels.linear import pack
from quire.worker.models.moe import ExpertLayers, panel_experts
from quire.worker.weights.linear_weight import PlainWeight

# mixture |-> experts, experts per token, hidden size, intermediate size of an expert.
MIXTURES = {"qwen3": (32, 8, 2048, 768), "small": (16, 4, 256, 128)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = 1, 16, 256
# Steps whose tokens choose other experts, in turn.
NUM_STEPS = 4


def make_experts(count: int, hidden: int, inner: int, dtype: torch.dtype) -> ExpertLayers:
    """Return random experts."""

    def weights(rows: int, columns: int) -> list[PlainWeight]:
        return [
            PlainWeight(pack((torch.randn(rows, columns) / columns**0.5).to(dtype))) for _ in range(count)
        ]

    return ExpertLayers(weights(2 * inner, hidden), weights(hidden, inner), GatedActivation("silu"), count)


def make_step(
    num_rows: int, count: int, per_token: int, hidden: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return tokens, factors and expert ids."""
    ids = torch.rand(num_rows, count).argsort(dim=1)[:, :per_token].contiguous()
    return torch.randn(num_rows, hidden).to(dtype), torch.rand(num_rows, per_token), ids


def measure(
    mixture: str, dtype: str, num_rows: int, layers: ExpertLayers, repetitions: int
) -> dict[str, Figure]:
    """Return the median times of both ways."""
    count, per_token, hidden, _ = MIXTURES[mixture]
    together = panel_experts(layers)
    assert together is not None, "there is no C++ compiler"
    steps = cycle([make_step(num_rows, count, per_token, hidden, DTYPES[dtype]) for _ in range(NUM_STEPS)])
    times: dict[str, list[float]] = {"one_call": [], "one_by_one": []}
    for repetition in range(repetitions + 1):
        step = next(steps)
        for way, experts in (("one_call", together), ("one_by_one", layers)):
            started = time.perf_counter()
            experts.forward(*step)
            if repetition:
                times[way].append(time.perf_counter() - started)
    name = f"experts.{mixture}.{dtype}.{num_rows}"
    return {f"{name}.{way}": Figure(1e3 * median(each), "ms") for way, each in times.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    repetitions = 3 if arguments.quick else 20
    torch.manual_seed(0)
    figures: dict[str, Figure] = {}
    with torch.inference_mode():
        for mixture, (count, _, hidden, inner) in MIXTURES.items():
            for dtype, own in DTYPES.items():
                layers = make_experts(count, hidden, inner, own)
                for num_rows in ROWS:
                    figures |= measure(mixture, dtype, num_rows, layers, repetitions)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
