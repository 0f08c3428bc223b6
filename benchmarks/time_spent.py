"""The time of each workload by where it goes: arithmetic, memory, all-reduce, sampling, batches and the scheduler.

    python -m benchmarks.time_spent --json benchmarks/results/time_spent.json
    python -m benchmarks.time_spent --model m --workloads w2,w3,w4 --json FILE
    python -m benchmarks.time_spent --dtype bfloat16 --json FILE

`tp1` is one rank with all cores: an LLM runs the workload, and each step is timed. `tp2` is two ranks of half of the
cores each, which execute the same plans again without a scheduler. `arithmetic` and `memory` are the least time of
linear layers and attention on this machine: operations at the rate of a large matmul, or bytes of weights and KV
cache at the rate of a large read, whichever takes longer in a step. Both rates are the best ones of the same run.
`all_reduce` includes the wait for the other rank. `forward` is the rest of the forward pass: kernels that are slower
than the machine's limits, small ops, and Python between them. `batch` is the application of plans and the gathering
of batches. `scheduler` includes requests and outputs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.common import Figure, make_parser, names_from, report
from benchmarks.kernels_cpu import HOST, ROTATED_BYTES
from benchmarks.offline import MAX_MODEL_LEN, num_cores, time_batch
from benchmarks.random_models import MODELS, make_model
from benchmarks.workloads import WORKLOADS, warm_up
from quire import LLM
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.kernels.linear import linear, pack
from quire.proto.config import EngineConfig
from quire.proto.step import StepPlan
from quire.worker.comm.communicator import Communicator
from quire.worker.comm.shared_memory import join_group
from quire.worker.comm.torch_distributed import create_store
from quire.worker.rank.runner import DTYPES, ModelRunner
from quire.worker.step.batch import Batch, gather_batch

NUM_RANKS = 2
JOIN_TIMEOUT_S = 600.0
END_TIMEOUT_S = 600.0
PARTS = ("arithmetic", "memory", "all_reduce", "forward", "sample", "batch", "scheduler")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers that a step must read and multiply, of all ranks together.

    Attributes:
        layers: weights of the linear layers.
        last: of these, the weights of the last layer that multiply only the tokens that rows sample from.
        head: weights of the LM head.
        kv: numbers in the KV cache per token.
        attention: products per token and context token.
        num_layers: in the last one, only the tokens that rows sample from attend.
    """

    layers: int
    last: int
    head: int
    kv: int
    attention: int
    itemsize: int
    num_layers: int

    @classmethod
    def of(cls, config: EngineConfig) -> ModelSize:
        shapes: dict[str, tuple[int, ...]] = {}
        for path in Path(config.model.path).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        counts = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
        embedding = next(count for name, count in counts.items() if "embed_tokens" in name)
        head = counts.get("lm_head.weight", embedding)
        model = config.model
        layers = {name: count for name, count in counts.items() if ".layers." in name}
        last = f".layers.{model.num_layers - 1}."
        for_keys = "q_proj", "k_proj", "v_proj", "qkv_proj"
        head_numbers = model.num_layers * model.head_dim
        return cls(
            sum(layers.values()),
            sum(n for name, n in layers.items() if last in name and not any(own in name for own in for_keys)),
            head,
            2 * head_numbers * model.num_kv_heads,
            2 * head_numbers * model.num_heads,
            DTYPES[model.dtype].itemsize,
            model.num_layers,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates of this machine: floating-point operations and bytes read, per second."""

    flops: float
    read: float

    def seconds(self, size: ModelSize, batch: Batch) -> tuple[float, float]:
        """Return the least seconds of a step that are bound by arithmetic, and those bound by memory."""
        lens, num_sampled = batch.lens.astype(int), len(batch.sampled_rows)
        num_new, contexts = len(batch.token_ids), int((batch.positions + 1).sum())
        contexts -= (contexts - int(batch.sampled_positions.sum())) // size.num_layers
        work = (
            (2 * (num_new * (size.layers - size.last) + num_sampled * (size.last + size.head)),
             size.itemsize * (size.layers + (size.head if num_sampled else 0))),
            (2 * contexts * size.attention, size.itemsize * size.kv * int(lens.sum())),
        )  # fmt: skip
        arithmetic = memory = 0.0
        for flops, num_bytes in work:
            if flops * self.read > num_bytes * self.flops:
                arithmetic += flops / self.flops
            else:
                memory += num_bytes / self.read
        return arithmetic, memory


@dataclass(slots=True)
class Spent:
    """Seconds of one workload.

    Attributes:
        wall: of the whole workload.
        stages: of all steps, by stage of the rank.
    """

    wall: float = 0.0
    executed: float = 0.0
    all_reduce: float = 0.0
    arithmetic: float = 0.0
    memory: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0

    def figures(self, prefix: str) -> dict[str, Figure]:
        """Return the wall time, and the seconds of PARTS, which add up to it."""
        forward, sample = self.stages.get("forward", 0.0), self.stages.get("sample", 0.0)
        parts = {
            "wall": self.wall,
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "all_reduce": self.all_reduce,
            "forward": forward - self.all_reduce - self.arithmetic - self.memory,
            "sample": sample,
            "batch": self.executed - forward - sample,
            "scheduler": self.wall - self.executed,
        }
        note = f"{self.num_steps} steps"
        return {f"{prefix}.{name}_s": Figure(value, "s", note) for name, value in parts.items()}


class Recorder:
    """Times the steps of the ModelRunner in this process.

    Attributes:
        spent: of the current workload; replace it to begin another.
        plans: encoded plans of all steps.
    """

    def __init__(self, limits: Limits, size: ModelSize) -> None:
        self.spent = Spent()
        self.plans: list[bytes] = []
        self._limits, self._size = limits, size

    @contextmanager
    def installed(self) -> Iterator[None]:
        launch = ModelRunner.launch
        recorder = self

        def timed(runner: ModelRunner, plan: StepPlan) -> Any:
            recorder.plans.append(plan.encode())
            started = time.perf_counter()
            launched = launch(runner, plan)  # on a CPU, executes the step
            recorder.spent.executed += time.perf_counter() - started
            recorder.spent.num_steps += 1
            for stage, seconds in launched.launched.stage_times.items():
                recorder.spent.stages[stage] = recorder.spent.stages.get(stage, 0.0) + seconds
            return launched

        with (
            mock.patch.object(ModelRunner, "launch", timed),
            mock.patch("quire.worker.rank.runner.gather_batch", self._gather),
        ):
            yield

    def _gather(self, *arguments: Any) -> Batch | None:
        batch = gather_batch(*arguments)
        if batch is not None:
            arithmetic, memory = self._limits.seconds(self._size, batch)
            self.spent.arithmetic += arithmetic
            self.spent.memory += memory
        return batch


class TimedCommunicator:
    """Communicator that adds the time of its collectives.

    Attributes:
        seconds: in collectives.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.seconds = 0.0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        total = self._comm.all_reduce(tensor)
        self.seconds += time.perf_counter() - started
        return total

    def all_gather(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        gathered = self._comm.all_gather(tensor)
        self.seconds += time.perf_counter() - started
        return gathered

    def barrier(self) -> None:
        self._comm.barrier()

    def close(self) -> None:
        self._comm.close()


Recorded = list[tuple[str, list[bytes]]]  # workload, encoded plans; the first is the warm-up


def measure_limits(repetitions: int) -> Limits:
    """Measure the rates of a large matmul and of a large read, in float32.

    A limit is the best of all repetitions, since other processes only lower a rate.
    """
    source, target = torch.randn(ROTATED_BYTES // 4), torch.empty(ROTATED_BYTES // 4)
    square = torch.randn(2048, 2048)
    weight = pack(square)
    flops, read_bytes = 2 * len(square) ** 3, source.nbytes
    rates = {
        "flops": (
            flops / best_time(lambda: square @ square, repetitions),
            flops / best_time(lambda: linear(square, weight), repetitions),
        ),
        "read": (
            read_bytes / best_time(source.max, repetitions),
            2 * read_bytes / best_time(lambda: target.copy_(source), repetitions),
        ),
    }
    return Limits(**{name: max(found) for name, found in rates.items()})


def best_time(op: Callable[[], object], repetitions: int) -> float:
    """Return the least seconds of a call."""
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        op()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure_one_rank(
    folder: Path, dtype: str, limits: Limits, workloads: Sequence[str]
) -> tuple[dict[str, Spent], Recorded, int]:
    """Return the seconds of each workload, the plans, and the number of KV blocks."""
    with LLM(str(folder), dtype=dtype, max_model_len=MAX_MODEL_LEN) as llm:
        recorder = Recorder(limits, ModelSize.of(llm.config))
        spent, plans = {}, []
        with recorder.installed():
            for name in ("warm_up", *workloads):
                recorder.spent, recorder.plans = Spent(), []
                batches = [warm_up()] if name == "warm_up" else WORKLOADS[name].batches(0)
                recorder.spent.wall = sum(time_batch(llm, batch) for batch in batches)
                spent[name] = recorder.spent
                plans.append((name, recorder.plans))
        assert llm.config.cache.num_blocks is not None
        return spent, plans, llm.config.cache.num_blocks


def measure_two_ranks(
    folder: Path, dtype: str, limits: Limits, plans: Recorded, num_blocks: int
) -> dict[str, Spent]:
    """Return the seconds of each workload on rank 0, while a child process is rank 1."""
    store, port = create_store(HOST)
    with tempfile.NamedTemporaryFile(suffix=".plans") as file:
        file.write(msgpack.packb(plans))
        file.flush()
        arguments = [str(folder), dtype, str(num_blocks), str(port), file.name]
        program = "import sys; from benchmarks.time_spent import run_peer; run_peer(*sys.argv[1:])"
        child = subprocess.Popen([sys.executable, "-c", program, *arguments])
        threads = torch.get_num_threads()
        try:
            spent = execute_plans(0, folder, dtype, num_blocks, port, plans, limits)
            child.wait(END_TIMEOUT_S)
        finally:
            torch.set_num_threads(threads)
            child.kill()
            child.wait()
    del store
    return spent


def run_peer(folder: str, dtype: str, num_blocks: str, port: str, plans: str) -> None:
    """Be rank 1 of `measure_two_ranks`."""
    recorded = [(name, frames) for name, frames in msgpack.unpackb(Path(plans).read_bytes())]
    execute_plans(1, Path(folder), dtype, int(num_blocks), int(port), recorded, Limits(1.0, 1.0))


def execute_plans(
    rank: int, folder: Path, dtype: str, num_blocks: int, port: int, plans: Recorded, limits: Limits
) -> dict[str, Spent]:
    """Execute the plans of one rank as they were recorded; return the seconds of each workload."""
    options = EngineOptions(
        str(folder), tensor_parallel_size=NUM_RANKS, dtype=dtype, device="cpu", max_model_len=MAX_MODEL_LEN
    )
    config = resolve(options, Machine.this()).with_num_blocks(num_blocks)
    comm = TimedCommunicator(join_group(rank, NUM_RANKS, HOST, port, torch.device("cpu"), JOIN_TIMEOUT_S))
    runner = ModelRunner(config, comm)
    recorder = Recorder(limits, ModelSize.of(config))
    found = {}
    try:
        runner.allocate_cache(num_blocks)
        with recorder.installed():
            for name, frames in plans:
                comm.barrier()
                recorder.spent, comm.seconds = Spent(), 0.0
                for frame in frames:
                    runner.execute(StepPlan.decode(frame))
                recorder.spent.wall, recorder.spent.all_reduce = recorder.spent.executed, comm.seconds
                found[name] = recorder.spent
    finally:
        runner.close()
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Figure]:
    make_model(folder, arguments.model)
    limits = measure_limits(arguments.repetitions)
    figures = {
        "time_spent.limit.matmul": Figure(limits.flops / 1e9, "GFLOP/s"),
        "time_spent.limit.read": Figure(limits.read / 1e9, "GB/s"),
    }
    one, plans, num_blocks = measure_one_rank(folder, arguments.dtype, limits, arguments.workloads)
    two = measure_two_ranks(folder, arguments.dtype, limits, plans, num_blocks)
    for name in arguments.workloads:
        figures |= one[name].figures(f"time_spent.tp1.{name}") | two[name].figures(f"time_spent.tp2.{name}")
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="s", help="model to create (default: %(default)s)")
    parser.add_argument("--workloads", type=names_from(WORKLOADS), default="w1,w3,w4,w5", metavar="NAME,...",
                        help=f"of {', '.join(WORKLOADS)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repetitions", type=int, default=20, help="of each limit (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder) / arguments.model)
    note = f"model {arguments.model}, {arguments.dtype}, {num_cores()} cores"
    figures = {
        name: Figure(figure.value, figure.unit, ", ".join(filter(None, (figure.note, note))))
        for name, figure in figures.items()
    }
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
