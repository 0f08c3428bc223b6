"""The experts of a mixture on a CPU: all in one C++ call, beside the same experts one by one, or dequantized.

    python -m benchmarks.experts [--quick] [--only router] --json benchmarks/results/experts.json

- experts.<mixture>.<dtype>.<rows>.one_call and .one_by_one: ms per layer for that many tokens, without the router.
  The calls alternate and have the same weights. qwen3 has the sizes of a layer of Qwen3-30B-A3B, but 32 of its 128
  experts.
- experts.gpt-oss.<format>.<rows>.quantized and .dequantized: experts in MXFP4, in float8 with a scale per 120 inputs,
  or in int4 with a scale per 32, which the call dequantizes, beside the same experts in bfloat16. gpt-oss has the
  sizes of a layer of gpt-oss-120b, but 8 of its 128 experts.
- experts.gpt-oss.<format>.quantized_bytes and .dequantized_bytes: of these weights.
- experts.router.<mixture>.<rows>.native and .by_torch: us per layer to choose experts by their scores, in one C++
  call and by PyTorch; the calls alternate. experts.router.<mixture>.<rows>.scores: us that both take before for the
  scores: the router's linear layer, and the softmax or sigmoid.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Figure, make_parser, median, report
from quire.kernels.activation import GatedActivation
from quire.kernels.linear import pack
from quire.kernels.native.memory import keep_freed_memory
from quire.kernels.panel_experts import PanelExperts
from quire.kernels.quantized_linear import FLOAT4, FLOAT8, QuantizedWeight
from quire.kernels.quantized_panels import QuantizedPanels, dequantize_panels, pack_quantized
from quire.kernels.routing import Routing
from quire.worker.models.moe.adapted_experts import ExpertsForward
from quire.worker.models.moe.moe import ExpertLayers, panel_experts
from quire.worker.weights.linear_weight import PlainWeight

# mixture |-> experts, experts per token, hidden size, intermediate size of an expert.
MIXTURES = {"qwen3": (32, 8, 2048, 768), "small": (16, 4, 256, 128)}
GPT_OSS = 8, 4, 2880, 2880
# Formats of quantized experts |-> inputs that share a scale.
GROUP_LENS = {"mxfp4": 32, "float8": 120, "int4": 32}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = 1, 16, 256
# mixture |-> hidden size, its routing, and whether its scores are sigmoids of logits in float32.
ROUTERS = {
    "deepseek-v3": (7168, Routing(256, 8, 8, 4, 2, normalized=True, scale=2.5), True),
    "qwen3": (2048, Routing(128, 8, normalized=True), False),
    "mixtral": (4096, Routing(8, 2, normalized=True), False),
}
# Bytes of the router's weights that take turns, so that they come from memory as in a step.
ROTATED_BYTES = 256 << 20
# Of freed memory, as a rank keeps it.
KEPT_BYTES = 512 << 20
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


def random_codes(form: str, rows: int, columns: int) -> QuantizedWeight:
    """Return a random weight of a key of GROUP_LENS."""
    groups = columns // GROUP_LENS[form], rows
    if form == "float8":
        return QuantizedWeight((100 * torch.randn(rows, columns)).to(FLOAT8), torch.rand(groups) / 5000)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    if form == "mxfp4":
        return QuantizedWeight(codes.view(FLOAT4), torch.randint(-9, -5, groups).float().exp2())
    return QuantizedWeight(codes, torch.rand(groups) / 300, torch.full(groups, 8, dtype=torch.int16))


def make_quantized(form: str) -> tuple[dict[str, PanelExperts], dict[str, Figure]]:
    """Return experts in few bits and in bfloat16, and their bytes."""
    count, _, hidden, inner = GPT_OSS
    activation, name = GatedActivation("silu"), f"experts.gpt-oss.{form}"
    gate_up = [packed_codes(form, 2 * inner, hidden) for _ in range(count)]
    down = [packed_codes(form, hidden, inner) for _ in range(count)]
    plain_gate_up, plain_down = (
        [dequantize_panels(weight, torch.bfloat16) for weight in weights] for weights in (gate_up, down)
    )
    ways = {
        "quantized": PanelExperts(gate_up, down, activation, dtype=torch.bfloat16),
        "dequantized": PanelExperts(plain_gate_up, plain_down, activation),
    }
    sizes = {
        "quantized": sum(weight.nbytes for weight in (*gate_up, *down)),
        "dequantized": sum(weight.weight.nbytes for weight in (*plain_gate_up, *plain_down)),
    }
    return ways, {f"{name}.{way}_bytes": Figure(size, "bytes") for way, size in sizes.items()}


def packed_codes(form: str, rows: int, columns: int) -> QuantizedPanels:
    packed = pack_quantized(random_codes(form, rows, columns))
    assert packed is not None, "there is no C++ compiler"
    return packed


def measure(
    name: str, ways: Mapping[str, ExpertsForward], steps: Sequence[tuple[Tensor, ...]], repetitions: int
) -> dict[str, Figure]:
    """Return the median time of each way; the ways alternate."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repetition in range(repetitions + 1):
        x, factors, ids = steps[repetition % len(steps)]
        for way, experts in ways.items():
            started = time.perf_counter()
            experts.forward(x, factors, ids)
            if repetition:
                times[way].append(time.perf_counter() - started)
    return {f"{name}.{way}": Figure(1e3 * median(each), "ms") for way, each in times.items()}


def measure_mixture(mixture: str, dtype: str, repetitions: int) -> dict[str, Figure]:
    """Return the figures of a mixture, in one call and one by one."""
    count, per_token, hidden, inner = MIXTURES[mixture]
    layers = make_experts(count, hidden, inner, DTYPES[dtype])
    together = panel_experts(layers, DTYPES[dtype])
    assert together is not None, "there is no C++ compiler"
    figures: dict[str, Figure] = {}
    for num_rows in ROWS:
        steps = [make_step(num_rows, count, per_token, hidden, DTYPES[dtype]) for _ in range(NUM_STEPS)]
        ways: dict[str, ExpertsForward] = {"one_call": together, "one_by_one": layers}
        figures |= measure(f"experts.{mixture}.{dtype}.{num_rows}", ways, steps, repetitions)
    return figures


def measure_quantized(form: str, repetitions: int) -> dict[str, Figure]:
    """Return the figures of experts in few bits and in bfloat16."""
    count, per_token, hidden, _ = GPT_OSS
    ways, figures = make_quantized(form)
    for num_rows in ROWS:
        steps = [make_step(num_rows, count, per_token, hidden, torch.bfloat16) for _ in range(NUM_STEPS)]
        figures |= measure(f"experts.gpt-oss.{form}.{num_rows}", ways, steps, repetitions)
    return figures


def measure_router(mixture: str, repetitions: int) -> dict[str, Figure]:
    """Return the figures of a router."""
    hidden, routing, is_sigmoid = ROUTERS[mixture]
    shape = ROTATED_BYTES // (2 * routing.num_experts * hidden), routing.num_experts, hidden
    weights = itertools.cycle((torch.randn(shape) / hidden**0.5).bfloat16())
    correction = torch.randn(routing.num_experts) if is_sigmoid else None

    def score(x: Tensor) -> Tensor:
        if is_sigmoid:
            return F.linear(x.float(), next(weights).float()).sigmoid()
        return F.linear(x, next(weights)).softmax(-1, torch.float32)

    figures: dict[str, Figure] = {}
    for num_rows in ROWS:
        ways: dict[str, Callable[[Tensor], object]] = {
            "native": lambda scores: routing.choose(scores, correction),
            "by_torch": lambda scores: routing.choose_by_torch(scores, correction),
        }
        times: dict[str, list[float]] = {way: [] for way in ("scores", *ways)}
        for repetition in range(-repetitions, 20 * repetitions):
            x, started = torch.randn(num_rows, hidden).bfloat16(), time.perf_counter()
            scores, ended = score(x), time.perf_counter()
            taken = {"scores": ended - started}
            for way, choose in ways.items():
                started = time.perf_counter()
                choose(scores)
                taken[way] = time.perf_counter() - started
            if repetition >= 0:
                for way, seconds in taken.items():
                    times[way].append(seconds)
        for way, each in times.items():
            figures[f"experts.router.{mixture}.{num_rows}.{way}"] = Figure(1e6 * median(each), "us")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--only", choices=["plain", "quantized", "router"], help="mixtures to measure; all by default"
    )
    arguments = parser.parse_args()
    repetitions = 3 if arguments.quick else 20
    keep_freed_memory(KEPT_BYTES)
    torch.manual_seed(0)
    figures: dict[str, Figure] = {}
    with torch.inference_mode():
        for mixture in ROUTERS if arguments.only in (None, "router") else ():
            figures |= measure_router(mixture, repetitions)
        for form in GROUP_LENS if arguments.only in (None, "quantized") else ():
            figures |= measure_quantized(form, repetitions)
        for mixture in MIXTURES if arguments.only in (None, "plain") else ():
            for dtype in DTYPES:
                figures |= measure_mixture(mixture, dtype, repetitions)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
