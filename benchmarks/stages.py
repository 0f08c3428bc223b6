"""Two pipeline stages on two CPU ranks, beside two tensor-parallel ranks: how long each rank waits for the others.

    python -m benchmarks.stages --json benchmarks/results/stages.json

The real scheduler serves a random Llama at steady load: more sequences wait than run, and all of them are as long, so
that those of a step end together. The ranks are processes of one thread each, without Ray. The processor time of a
stage's step depends less on what else the machine does than its duration.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figure, make_parser, report
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.config import EngineConfig
from quire.proto.model.parallel_split import ParallelSplit
from quire.proto.sampling import SamplingParams
from quire.proto.step import COLLECTIVES, StepPlan, StepResult, decode_reply
from quire.proto.stream import Submit
from quire.proto.transport.channel import ChannelAddress, StepReceiver, StepSender
from quire.scheduler import Scheduler

NUM_ROWS, NUM_SEQUENCES, PROMPT_LEN, NUM_TOKENS, NUM_BLOCKS = 16, 64, 12, 48, 128
NUM_ROUNDS, TIMEOUT_S = 3, 300.0
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SPLITS: dict[str, dict[str, Any]] = {
    "stages": {"pipeline_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Means of one rank's steps between the first and the last quarter.

    Attributes:
        step_s: from one step to the next.
        processor_s: of the rank's thread in the step.
        waited_s: for plans, for the other stage and in collectives.
    """

    step_s: float
    processor_s: float
    waited_s: float


def run_rank(
    rank: int, port: int, config: EngineConfig, address: ChannelAddress, results: Queue[tuple[int, RankTimes]]
) -> None:
    """Execute the channel's plans as one rank."""
    import torch

    from quire.worker.comm.replica_groups import ReplicaGroups
    from quire.worker.rank.runner import ModelRunner

    groups = ReplicaGroups(ParallelSplit.of(config.parallel), rank, torch.device("cpu"), TIMEOUT_S)
    own = groups.join("127.0.0.1", port)
    runner = ModelRunner(config, own.tensor, pipeline=own)
    runner.allocate_cache(NUM_BLOCKS)
    receiver = StepReceiver(address, rank)
    ended, steps = time.perf_counter(), list[tuple[float, float, float]]()
    while (frame := receiver.receive()) is not None:
        began, processor_began = time.perf_counter(), time.thread_time()
        result = runner.execute(StepPlan.decode(frame))
        processor_s = time.thread_time() - processor_began
        receiver.reply(result.encode())
        times = result.stage_times
        waited_s = began - ended + sum(times.get(name, 0.0) for name in ("await", *COLLECTIVES))
        before, ended = ended, time.perf_counter()
        steps.append((ended - before, processor_s, waited_s))
    receiver.close()
    part = steps[len(steps) // 4 : -len(steps) // 4]
    results.put((rank, RankTimes(*(statistics.mean(column) for column in zip(*part, strict=True)))))


def serve(config: EngineConfig) -> list[RankTimes]:
    """Serve all sequences; return the times of each rank."""
    from quire.worker.comm.torch_distributed import create_store

    split, spawn = ParallelSplit.of(config.parallel), multiprocessing.get_context("spawn")
    store, port = create_store("127.0.0.1")
    results: Queue[tuple[int, RankTimes]] = spawn.Queue()
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        sender = StepSender(ChannelAddress.in_directory(Path(folder)), split.num_ranks)
        processes = [
            spawn.Process(target=run_rank, args=(rank, port, config, sender.address, results), daemon=True)
            for rank in range(split.num_ranks)
        ]
        for process in processes:
            process.start()
        sender.wait_for_ranks(TIMEOUT_S)
        run_steps(Scheduler(config), sender, split.result_rank)
        sender.close()
        times = dict(results.get(timeout=TIMEOUT_S) for _ in processes)
        for process in processes:
            process.join(TIMEOUT_S)
    del store
    return [times[rank] for rank in range(split.num_ranks)]


def run_steps(scheduler: Scheduler, sender: StepSender, result_rank: int) -> None:
    """Drive the ranks as a step loop does, until all sequences have ended."""
    random = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
    for handle in range(NUM_SEQUENCES):
        prompt = random.integers(0, SIZES["vocab_size"], PROMPT_LEN).astype(np.int32)
        scheduler.add(b"gateway", Submit(handle, str(handle), prompt, sampling), time.monotonic())
    while scheduler.has_work:
        while scheduler.num_in_flight < scheduler.config.scheduler.max_steps_in_flight:
            plan = scheduler.schedule(time.monotonic())
            if plan is None:
                break
            sender.send(plan.encode())
        while (result := receive_result(sender)).rank != result_rank:
            pass
        scheduler.apply(result, time.monotonic())


def receive_result(sender: StepSender) -> StepResult:
    """Return the next result of any rank. Raises RuntimeError if there is none."""
    frame = sender.receive(TIMEOUT_S)
    result = None if frame is None else decode_reply(frame)
    if not isinstance(result, StepResult):
        raise RuntimeError(f"the ranks failed: {result}")
    return result


def write_model(folder: Path) -> None:
    """Write the model."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)


def config_of(folder: str, split: dict[str, Any]) -> EngineConfig:
    """Return the configuration of two ranks of one thread each."""
    options = EngineOptions(
        folder, device="cpu", max_num_seqs=NUM_ROWS, num_kv_blocks=NUM_BLOCKS, skip_tokenizer_init=True, **split
    )  # fmt: skip
    config = resolve(options, Machine(2, 0))
    return replace(config, parallel=replace(config.parallel, threads_per_rank=1))


def measure() -> dict[str, Figure]:
    """Return the medians of rounds in which the splits take turns."""
    runs: dict[str, list[list[RankTimes]]] = {name: [] for name in SPLITS}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for _ in range(NUM_ROUNDS):
            for name, split in SPLITS.items():
                runs[name].append(serve(config_of(folder, split)))
    figures: dict[str, Figure] = {}
    for name, rounds in runs.items():
        for rank in range(2):
            own = [times[rank] for times in rounds]
            shares = [100 * each.waited_s / each.step_s for each in own]
            figures[f"{name}.rank{rank}.waited"] = Figure(statistics.median(shares), "%", "of the time")
            processor_s = statistics.median(each.processor_s for each in own)
            figures[f"{name}.rank{rank}.processor_ms"] = Figure(1e3 * processor_s, "ms", "per step")
        step_s = statistics.median(times[0].step_s for times in rounds)
        num_rows = NUM_ROWS / SPLITS[name].get("pipeline_parallel_size", 1)
        figures[f"{name}.tokens_per_s"] = Figure(num_rows / step_s, "tokens/s", f"{NUM_ROWS} sequences")
    return figures


if __name__ == "__main__":
    arguments = make_parser(__doc__).parse_args()
    report(measure(), arguments.json)
