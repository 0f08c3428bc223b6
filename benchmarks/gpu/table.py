"""Tables of a result of `benchmarks.gpu`: beside the goals, for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Results = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of the table.

    Attributes:
        factor: multiplies the figure for the table.
        goal: text; empty if there is none.
    """

    figure: str
    label: str
    factor: float = 1.0
    unit: str = ""
    goal: str = ""


GOALS = (
    Goal("roof.copy", "copy", 1e-9, "GB/s"),
    Goal("roof.matmul", "matmul, bf16", 1e-12, "TFLOP/s"),
    Goal("roof.matmul_fp8_fast", "matmul, fp8", 1e-12, "TFLOP/s"),
    Goal("engine.graphs.start_s", "8B: start to ready", 1, "s"),
    Goal("engine.load.rate", "8B: weights loaded", 1e-9, "GB/s"),
    Goal("engine.graphs.kv_tokens", "8B: KV tokens", 1, ""),
    Goal("engine.memory.over_budget", "8B: memory beyond the budget", 2**-20, "MiB", "at most 0"),
    Goal("engine.decode.1x1024.graphs.step_ms", "8B: step of 1 row, 1k tokens", 1, "ms", "4.2 on an H200"),
    Goal("engine.decode.1x1024.graphs.share_of_copy", "its share of copy", 100, "%"),
    Goal("engine.decode.1x1024.graphs.host_gap_us", "its host gap", 1, "us", "below 50"),
    Goal("engine.decode.1x1024.eager.step_ms", "the same without graphs", 1, "ms"),
    Goal("engine.decode.64x1024.graphs.tokens_per_s", "8B: 64 rows of 1k", 1, "tokens/s"),
    Goal("engine.decode.64x1024.graphs.share_of_copy", "its share of copy", 100, "%"),
    Goal("engine.decode.64x1024.graphs.host_gap_us", "its host gap", 1, "us", "below 50"),
    Goal("engine.decode.256x1024.graphs.tokens_per_s", "8B: 256 rows of 1k", 1, "tokens/s"),
    Goal("engine.decode.256x1024.graphs.share_of_copy", "its share of copy", 100, "%"),
    Goal("engine.decode.1x65536.graphs.step_ms", "8B: step of 1 row, 64k tokens", 1, "ms"),
    Goal("engine.prefill.8192.tokens_per_s", "8B: prompt of 8k", 1, "tokens/s"),
    Goal("engine.prefill.8192.share_of_matmul", "its share of matmul", 100, "%"),
    Goal("engine.mixed.tokens_per_s", "8B: mixed load", 1, "tokens/s"),
    Goal("engine.mixed.step_p99_ms", "its 99th percentile of steps", 1, "ms"),
    Goal("engine.mixed.compilations", "its compilations after ready", 1, "", "0"),
    Goal("engine.decode.64x1024.fp8.tokens_per_s", "8B in fp8: 64 rows of 1k", 1, "tokens/s"),
    Goal("reference.equal_tokens", "tokens equal to transformers'", 100, "%"),
    Goal("reference.transformers.1x1024.step_ms", "transformers: step of 1 row", 1, "ms"),
    Goal("reference.transformers.64x1024.step_ms", "transformers: step of 64 rows", 1, "ms"),
    Goal("adapters.none.64x1024.step_ms", "8B: 64 rows, no adapter used", 1, "ms"),
    Goal("adapters.one.64x1024.step_ms", "the same, one adapter on all rows", 1, "ms"),
    Goal("adapters.several.64x1024.step_ms", "the same, 8 adapters", 1, "ms"),
    Goal("adapters.eager.64x1024.step_ms", "the same without graphs", 1, "ms"),
    Goal("latents.decode.64x1024.step_ms", "2.6B with latents: 64 rows of 1k", 1, "ms"),
    Goal("latents.decode.64x1024.share_of_copy", "its share of copy", 100, "%"),
    Goal("latents.prefill.8192.tokens_per_s", "2.6B with latents: prompt of 8k", 1, "tokens/s"),
    Goal("slices.gpt_oss.decode.64x1024.step_ms", "4 layers of gpt-oss-20b: 64 rows of 1k", 1, "ms"),
    Goal("slices.gpt_oss.prefill.8192.tokens_per_s", "4 layers of gpt-oss-20b: prompt of 8k", 1, "tokens/s"),
    Goal("slices.deepseek.decode.64x1024.step_ms", "2 layers of DeepSeek V3: 64 rows of 1k", 1, "ms"),
    Goal("slices.deepseek.prefill.8192.tokens_per_s", "2 layers of DeepSeek V3: prompt of 8k", 1, "tokens/s"),
    Goal("drafts.ngram.1x1024.step_ms", "8B: 1 row, 3 tokens by prompt lookup", 1, "ms"),
    Goal("drafts.eagle3.1x1024.step_ms", "8B: 1 row, 3 tokens by EAGLE-3", 1, "ms"),
    Goal("drafts.eagle3.64x1024.step_ms", "8B: 64 rows, 3 tokens by EAGLE-3", 1, "ms"),
    Goal("embeddings.512.tokens_per_s", "8B: embeddings of 512 tokens", 1, "tokens/s"),
    Goal("embeddings.512.share_of_matmul", "its share of matmul", 100, "%"),
    Goal("ranks.killed.freed_s", "memory of a killed rank free after", 1, "s"),
    Goal("ranks.two.recovered_s", "2 ranks on one GPU: one replaced", 1, "s"),
    Goal("kernels.decode.64x1024.share_of_copy", "decode attention, 64 x 1k, of copy", 100, "%", "85"),
    Goal("kernels.decode.1x65536.share_of_copy", "decode attention, 1 x 64k, of copy", 100, "%", "85"),
    Goal("kernels.prefill.8192.tflops", "prefill attention, 8k", 1, "TFLOP/s", "400"),
    Goal("kernels.latent_decode.64x1024.share_of_copy", "latent decode, 64 x 1k, of copy", 100, "%", "85"),
    Goal("kernels.latent_prefill.8192.tflops", "latent prefill, 8k", 1, "TFLOP/s", "400"),
    Goal("kernels.add_lora.64x8.us", "8 adapters, 64 rows, queries to values", 1, "us"),
    Goal("kernels.add_rms_norm.8192.share_of_copy", "norm, 8k tokens, of copy", 100, "%", "85"),
    Goal("kernels.silu_and_mul.8192.share_of_copy", "activation, 8k tokens, of copy", 100, "%", "85"),
)


# What needs more than one GPU, or Ray.
NOT_SHOWN = (
    "collectives of NCCL between GPUs, and their abort while a recorded step waits in one",
    "the fused all-reduce over NVLink: two ranks on one GPU share its memory",
    "ranks as actors of Ray: their start, their GPU's number, and their replacement after a lost device",
    "pinned memory and host tier under the load of several ranks",
)


def rows(results: Results) -> list[tuple[str, str, str, str]]:
    """Return label, value, unit and goal of every figure of GOALS that was measured."""
    figures = {name: figure for result in results for name, figure in result["figures"].items()}
    return [
        (goal.label, f"{goal.factor * figures[f'gpu.{goal.figure}']['value']:,.4g}", goal.unit, goal.goal)
        for goal in GOALS
        if f"gpu.{goal.figure}" in figures
    ]


def summary(results: Results) -> Iterable[str]:
    """Yield the table as aligned text."""
    return [
        f"{label:40} {value:>10} {unit:10} {'goal: ' + goal if goal else ''}".rstrip()
        for label, value, unit, goal in rows(results)
    ]


def problem_lines(results: Results) -> Iterable[str]:
    """Yield one line per stage that did not end well, and per problem."""
    for result in results:
        if result["status"] != "done":
            yield f"{result['stage']}: {result['status']}"
        for problem in result["problems"]:
            yield f"{result['stage']}, {problem['case']}: {problem['error'].splitlines()[0][:200]}"
