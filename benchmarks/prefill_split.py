"""Prefill and decode apart, simulated on GPUs: the tail of the gap between tokens, and what a split costs at most.

    python -m benchmarks.prefill_split --json benchmarks/results/prefill_split.json

Llama-3.1-8B on H100s, whose steps take assumed times (data sheet and usual efficiencies, no measurement). Four
replicas of one GPU each serve the same requests as four equal ones, and as one of the prefill role and three of the
decode role, which read 20 GB/s of KV. Everything that decides is the code that serves.

Figures:

- ``split.<load>.<way>.<figure>``: of `equal` replicas and of `roles`, under each load;
- ``split.<load>.loss``: the mean time of requests with roles over that with the same replicas and no prompt split,
  less 1: below 0 the split pays, and above 0 the cost model was wrong;
- ``split.borderline.loss.worst`` and ``.best``: the same of loads at which a split pays more or less: prompts of 500,
  2,000 and 8,000 tokens at three rates.

The loads: ``chat`` is short prompts and long outputs; ``documents`` adds prompts of 12,000 tokens; ``idle`` is a few
of these, one at a time; ``conversation`` is the first requests of Mooncake's trace of that name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import Figure, make_parser, report
from quire.cluster.config.deployment import ScalingLimits
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.simulation.engine import SimulatedEngine, make_engine
from quire.cluster.simulation.fleet import PrefillRole
from quire.cluster.simulation.run import Run, run_trace
from quire.cluster.simulation.traces import TracedRequest, TraceFile

NUM_REPLICAS, NUM_PREFILL = 4, 1
KV_BYTES_PER_S = 20e9
CONVERSATION = Path(__file__).parent / "traces" / "mooncake_conversation.jsonl.gz"
# https://huggingface.co/meta-llama/Llama-3.1-8B
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1500, help="of each load")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        engine = make_engine(EngineOptions(folder), "h100")
        figures: dict[str, Figure] = {}
        for name, make_trace in LOADS.items():
            figures |= compare(engine, name, partial(make_trace, arguments.requests))
            print(f"{name} done", flush=True)
        figures |= borderline(engine, arguments.requests // 4)
    report(figures, arguments.json)


def borderline(engine: SimulatedEngine, num_requests: int) -> dict[str, Figure]:
    """Return the greatest and the least loss over loads with one length of prompts each."""
    losses = {}
    for prompt_len in (500, 2000, 8000):
        for tokens_per_s in (2000.0, 10_000.0, 40_000.0):
            arrivals = np.cumsum(
                np.random.default_rng(1).exponential(prompt_len / tokens_per_s, num_requests)
            )
            trace = [TracedRequest(n, float(at), prompt_len, 200) for n, at in enumerate(arrivals)]
            loss, run = loss_of(engine, trace)
            losses[f"{prompt_len} tokens, {tokens_per_s:.0f} prompt tokens/s, {run.cost.num_split} split"] = (
                loss
            )
    worst, best = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
    return {
        "split.borderline.loss.worst": Figure(100 * losses[worst], "%", worst),
        "split.borderline.loss.best": Figure(100 * losses[best], "%", best),
    }


def loss_of(engine: SimulatedEngine, trace: list[TracedRequest]) -> tuple[float, Run]:
    """Return the loss by the split, and the run with it."""
    replicas = NUM_REPLICAS - NUM_PREFILL
    split = serve(engine, trace, replicas, PrefillRole(NUM_PREFILL, KV_BYTES_PER_S))
    alone = serve(engine, trace, replicas, PrefillRole(NUM_PREFILL, KV_BYTES_PER_S, splits=False))
    return split.summary.e2e.summary()["mean"] / alone.summary.e2e.summary()["mean"] - 1, split


def compare(
    engine: SimulatedEngine, load: str, trace: Callable[[], Iterable[TracedRequest]]
) -> dict[str, Figure]:
    """Return the figures of a load on equal replicas, and on replicas with roles."""
    roles = NUM_REPLICAS - NUM_PREFILL
    runs = {
        "equal": serve(engine, trace(), NUM_REPLICAS, None),
        "roles": serve(engine, trace(), roles, PrefillRole(NUM_PREFILL, KV_BYTES_PER_S)),
    }
    alone = serve(engine, trace(), roles, PrefillRole(NUM_PREFILL, KV_BYTES_PER_S, splits=False))
    figures = {}
    for way, run in runs.items():
        note = f"{run.cost.num_split} of {run.summary.num_ended} prompts split"
        values = run.figures()
        for name, row, key in (
            ("gap.p99", "itl_s", "p99"),
            ("gap.p50", "itl_s", "p50"),
            ("first_token.p99", "ttft_s", "p99"),
            ("request.mean", "e2e_s", "mean"),
        ):
            figures[f"split.{load}.{way}.{name}"] = Figure(1e3 * values[row][key], "ms", note)
    loss = runs["roles"].summary.e2e.summary()["mean"] / alone.summary.e2e.summary()["mean"] - 1
    figures[f"split.{load}.loss"] = Figure(100 * loss, "%", "mean time of requests, to that without splits")
    return figures


def serve(
    engine: SimulatedEngine, trace: Iterable[TracedRequest], num_replicas: int, prefill: PrefillRole | None
) -> Run:
    limits = ScalingLimits(min_replicas=num_replicas, max_replicas=num_replicas)
    return run_trace(engine, trace, limits, prefill=prefill)


def chat(num_requests: int) -> list[TracedRequest]:
    return poisson(num_requests, per_s=60.0, share_long=0.0)


def documents(num_requests: int) -> list[TracedRequest]:
    return poisson(num_requests, per_s=30.0, share_long=0.12)


def idle(num_requests: int) -> list[TracedRequest]:
    return [TracedRequest(number, 4.0 * number, 12_000, 100) for number in range(num_requests // 20)]


def conversation(num_requests: int) -> Iterable[TracedRequest]:
    return TraceFile(CONVERSATION, num_requests, 1.0)


LOADS: dict[str, Callable[[int], Iterable[TracedRequest]]] = {
    "chat": chat,
    "documents": documents,
    "idle": idle,
    "conversation": conversation,
}


def poisson(num_requests: int, per_s: float, share_long: float) -> list[TracedRequest]:
    """Return requests at random times, the same at each call: short ones, and a share with long prompts."""
    random = np.random.default_rng(0)
    arrivals = np.cumsum(random.exponential(1 / per_s, num_requests))
    is_long = random.random(num_requests) < share_long
    prompts = np.where(is_long, 12_000, random.integers(50, 400, num_requests))
    outputs = np.where(is_long, 100, random.integers(100, 500, num_requests))
    return [
        TracedRequest(number, float(arrivals[number]), int(prompts[number]), int(outputs[number]))
        for number in range(num_requests)
    ]


if __name__ == "__main__":
    main()
