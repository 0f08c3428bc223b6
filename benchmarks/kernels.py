"""Measure the kernels on this machine, beside PyTorch's implementations of the same ops.

    python -m benchmarks.kernels --json benchmarks/results/kernels.json --plot roofline.png

Runs on the CPU; `benchmarks.gpu` measures the kernels of a GPU. Each op and its peers take turns in one process;
figures are medians. `kernels.<op>.<shape>.us` is microseconds per call. `share_of_copy` is the op's necessary bytes
per second over those of a large copy in the same run, and `share_of_matmul` its operations per second over those of a
large matmul; the one that bounds the op is reported. Weights and KV caches do not fit into the processor's caches.
"""

from __future__ import annotations

import torch

from benchmarks import kernels_cpu, kernels_cpu_layers
from benchmarks.common import Figure, image_path, make_parser, report
from benchmarks.roofline import plot


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--plot", type=image_path, metavar="FILE", help="draw a roofline")
    parser.add_argument("--repetitions", type=int, default=20, help="of each op (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        machine, roof, cases = kernels_cpu.measure(arguments.repetitions)
        cases += kernels_cpu_layers.measure(arguments.repetitions)
        figures = kernels_cpu.all_reduces(arguments.repetitions)
    figures = roof.figures() | {k: v for case in cases for k, v in case.figures(roof).items()} | figures
    report({name: Figure(f.value, f.unit, machine) for name, f in figures.items()}, arguments.json)
    if arguments.plot is not None:
        plot(arguments.plot, machine, roof, cases)


if __name__ == "__main__":
    main()
