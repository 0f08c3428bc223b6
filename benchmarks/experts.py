"""Experts on four CPU ranks: tokens that travel to them beside all-reduces, and experts that move by their load.

    python -m benchmarks.experts --json benchmarks/results/experts.json

A random model of the DeepSeek-V3 kind whose routers prefer some experts decodes on four processes with data-parallel
attention. No Ray, no scheduler: the plans are made here.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figure, make_parser, report
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.block_tables import BlockTables
from quire.proto.config import EngineConfig
from quire.proto.model.expert_placement import Placement, first_placement, imbalance
from quire.proto.step import NewSequence, RowSampling, StepPlan

NUM_RANKS, NUM_ROWS, PROMPT_LEN, NUM_BLOCKS = 4, 32, 16, 128
# Decode steps: the first ones are not timed, and experts move within them.
NUM_WARM_UP, NUM_TIMED = 120, 60
NUM_EXPERTS, TOP_K, HIDDEN, NUM_REDUNDANT = 32, 4, 512, 4
TIMEOUT_S = 300.0
SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": HIDDEN, "intermediate_size": 1024, "moe_intermediate_size": 128,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 1,
    "n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "all_to_all": {"all2all_backend": "all_to_all"},
    "balanced": {
        "all2all_backend": "all_to_all",
        "enable_eplb": True,
        "num_redundant_experts": NUM_REDUNDANT,
        "eplb_step_interval": 40,
    },
}


@dataclass(frozen=True, slots=True)
class RankRun:
    """Measurements of one rank.

    Attributes:
        step_s: of the timed steps.
        sent_bytes: in timed steps, to other ranks; 0 without all-to-all.
        loads: of each layer, how often its tokens chose each expert since the experts moved.
        placements: of each layer.
    """

    step_s: list[float]
    sent_bytes: int
    loads: list[list[float]]
    placements: list[Placement]


def write_model(folder: Path) -> None:
    """Write the model; its routers' corrections prefer the first experts."""
    import torch
    import transformers

    config = transformers.DeepseekV3Config(**SIZES)
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.arange(NUM_EXPERTS, 0, -1).log())
            elif tensor.dim() == 2:
                tensor.copy_(torch.randn(tensor.shape) * tensor.shape[1] ** -0.5)
    model.save_pretrained(folder)


def make_plans(config: EngineConfig) -> Iterator[StepPlan]:
    """Yield one step of all prompts and then steps that decode; each rank has a quarter of the rows."""
    tables = BlockTables(NUM_ROWS, config.max_blocks_per_seq, 1)
    num_own = -(-(PROMPT_LEN + NUM_WARM_UP + NUM_TIMED + 1) // config.cache.block_size)
    random = np.random.default_rng(0)
    new = []
    for row in range(NUM_ROWS):
        turn, partition = divmod(row, NUM_RANKS)
        first = partition * NUM_BLOCKS + 1 + turn * num_own
        blocks = np.arange(first, first + num_own, dtype=np.int32)
        prompt = random.integers(0, SIZES["vocab_size"], PROMPT_LEN).astype(np.int32)
        tables.append(np.full(num_own, row, np.int32), blocks)
        new.append(NewSequence(row, row, prompt, 0, blocks, RowSampling(temperature=1.0, seed=row)))
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    lens = np.full(NUM_ROWS, PROMPT_LEN, np.int32)
    yield StepPlan(1, 1, tables.digest, new=tuple(new), chunk_rows=rows, chunk_lens=lens)
    for step_id in range(2, 2 + NUM_WARM_UP + NUM_TIMED):
        yield StepPlan(step_id, 1, tables.digest)


def run_rank(rank: int, port: int, config: EngineConfig, frames: list[bytes]) -> RankRun:
    """Execute the plans as one rank."""
    import torch

    from quire.worker.comm.expert_exchange import AllToAll
    from quire.worker.comm.shared_memory import join_group
    from quire.worker.models.llama.decoder import Decoder
    from quire.worker.models.moe.replicas import Replicas
    from quire.worker.rank.runner import ModelRunner

    comm = join_group(rank, NUM_RANKS, "127.0.0.1", port, torch.device("cpu"), TIMEOUT_S)
    runner = ModelRunner(config, comm)
    runner.allocate_cache(NUM_BLOCKS)
    decoder = runner.memory.loaded.model
    assert isinstance(decoder, Decoder)
    mixtures = decoder.mixtures
    exchanges = {id(own.exchange): own.exchange for own in mixtures if isinstance(own.exchange, AllToAll)}
    replicas = [own.replicas for own in mixtures if isinstance(own.replicas, Replicas)]
    step_s, sent_before = [], 0
    for index, frame in enumerate(frames):
        if index == 1 + NUM_WARM_UP:
            with torch.inference_mode():
                for each in replicas:
                    each.loads.zero_()
            sent_before = sum(own.num_sent_bytes for own in exchanges.values())
        began_at = time.perf_counter()
        runner.execute(StepPlan.decode(frame))
        step_s.append(time.perf_counter() - began_at)
    sent = sum(own.num_sent_bytes for own in exchanges.values()) - sent_before
    loads, placements = [own.loads.tolist() for own in replicas], [own.placement for own in replicas]
    runner.close()
    return RankRun(step_s[1 + NUM_WARM_UP :], sent, loads, placements)


def run_ranks(config: EngineConfig) -> list[RankRun]:
    """Run all ranks in processes of their own."""
    from quire.worker.comm.torch_distributed import create_store

    frames = [plan.encode() for plan in make_plans(config)]
    store, port = create_store("127.0.0.1")
    with multiprocessing.get_context("spawn").Pool(NUM_RANKS) as pool:
        calls = [pool.apply_async(run_rank, (rank, port, config, frames)) for rank in range(NUM_RANKS)]
        runs = [call.get(TIMEOUT_S) for call in calls]
    del store
    return runs


def measure() -> dict[str, Figure]:
    """Return the figures of all settings."""
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name, settings in SETTINGS.items():
            options = EngineOptions(
                folder, tensor_parallel_size=NUM_RANKS, enable_expert_parallel=True, enable_dp_attention=True,
                device="cpu", max_num_seqs=NUM_ROWS, num_kv_blocks=NUM_BLOCKS, skip_tokenizer_init=True, **settings,
            )  # fmt: skip
            config = resolve(options, Machine(NUM_RANKS, 0))
            config = replace(config, parallel=replace(config.parallel, threads_per_rank=1))
            runs = run_ranks(config)
            median_s = statistics.median(runs[0].step_s)
            note = f"{NUM_ROWS} rows on {NUM_RANKS} processes"
            figures[f"{name}.step_ms"] = Figure(1e3 * median_s, "ms", note)
            figures[f"{name}.sent_bytes"] = Figure(
                sent_bytes(runs), "bytes", "per token and layer, all ranks"
            )
            if runs[0].loads:
                figures |= loads_of(runs)
    return figures


def sent_bytes(runs: list[RankRun]) -> float:
    """Return the bytes that cross between ranks per token and layer with experts.

    Of all-reduces they are counted: one after attention and one after experts, each a reduce-scatter and a gather.
    """
    measured = sum(run.sent_bytes for run in runs)
    if not measured:
        return float(2 * 2 * (NUM_RANKS - 1) * HIDDEN * 4)
    num_layers = SIZES["num_hidden_layers"] - SIZES["first_k_dense_replace"]
    return measured / (NUM_ROWS * NUM_TIMED * num_layers)


def loads_of(runs: list[RankRun]) -> dict[str, Figure]:
    """Return the load of the busiest rank by the same choices: with experts in order, and where they have moved."""
    ratios: list[tuple[float, float]] = []
    for layer, placement in enumerate(runs[0].placements):
        loads = np.sum([run.loads[layer] for run in runs], axis=0).tolist()
        in_order = first_placement(NUM_EXPERTS, NUM_EXPERTS)
        ratios.append((imbalance(loads, in_order, NUM_RANKS), imbalance(loads, placement, NUM_RANKS)))
    before, after = (statistics.mean(own) for own in zip(*ratios, strict=True))
    note = f"mean of {len(ratios)} layers; choices of {NUM_TIMED} steps after the moves"
    return {
        "balanced.busiest_before": Figure(before, "times the mean", note),
        "balanced.busiest_after": Figure(after, "times the mean", note),
    }


if __name__ == "__main__":
    arguments = make_parser(__doc__).parse_args()
    report(measure(), arguments.json)
