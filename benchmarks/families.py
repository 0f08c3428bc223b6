"""Load, prefill and decode of one small model of each kind on a CPU, beside transformers and llama.cpp.

    python -m benchmarks.families --json benchmarks/results/families.json
    python -m benchmarks.families --peers DIR --json benchmarks/results/families_peers.json

Each engine loads each model in a process of its own, with as many threads as cores, which `taskset` may limit, in
float32. The models are random: the time of a step depends on their sizes only. Prefill and decode of one sequence
are measured by turns, while the other engines' processes are stopped. With --peers llama.cpp takes part, of the
folder DIR of `benchmarks.peers.install`, with the kinds in LLAMA_CPP only, and loads are not measured. A figure notes
why an engine failed. With --processor-time the rates are tokens per second of processor time, for a machine that has
other work: then run on one core, since threads that wait use time, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, make_parser, median, names_from, report, write_figures
from benchmarks.offline import num_cores
from benchmarks.peers.comparison import Comparison, Limits
from benchmarks.peers.engine import Requests
from benchmarks.peers.process import Engine
from benchmarks.random_models import make_tokenizer
from benchmarks.workloads import Walls, Workload, single

NUM_KV_BLOCKS = 512  # the layers of a kind may be in several cache groups, each with blocks of its own
SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALLER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_PER_LAYER: dict[str, Any] = {
    "vocab_size_per_layer_input": 32000,
    "hidden_size_per_layer_input": 32,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
_HYBRID = ["linear_attention", "linear_attention", "full_attention"] * 2
# The heads of Qwen3-Next, in its proportion to the hidden size.
_DELTA: dict[str, Any] = {
    "layer_types": _HYBRID,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}
# Model type |-> its configuration besides SIZES.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 256},
    "gemma3n_text": _PER_LAYER | {"laurel_rank": 32},
    "gemma4_text": _PER_LAYER | {"global_head_dim": 128},
    "cohere2": {"sliding_window": 256},
    "gptj": {"rotary_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "llama4_text": {"intermediate_size": 256, "intermediate_size_mlp": 1024, "num_local_experts": 8},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 256,
        "sliding_window": 256,
    },
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT
    | {"q_lora_rank": 256, "index_topk": 256, "index_n_heads": 8, "index_head_dim": 64},
    "gpt_neox": {},
    # Layers that keep states: short convolutions, gated delta nets, Kimi delta attention, Mamba, Mamba 2, lightning
    # attention and gated linear recurrent units.
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 256},
    "kimi_linear": _LATENT
    | {
        "layer_types": _HYBRID,
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "linear_head_dim": 128,
        "linear_num_heads": 4,
        "num_local_experts": 8,
    },
    "mamba": {"state_size": 16},
    "bamba": _MAMBA_2 | {"attn_layer_indices": [2, 5]},
    "minimax": {
        "layer_types": _HYBRID,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 256,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 256},
}
_WITHOUT_HEAD_DIM = ("gptj", "gpt_neox")
# The kinds that llama.cpp converts from the files that transformers writes; its greedy tokens are transformers'.
LLAMA_CPP = (
    *("llama", "qwen3", "gemma4_text", "cohere2", "mixtral", "llama4_text", "gpt_oss", "gpt_neox"),
    *("lfm2", "qwen3_5_text", "qwen3_next", "mamba", "bamba"),
)

# Of the prompt whose prefill is timed, of that before decoding, tokens that are decoded, and repetitions.
PREFILL_LEN, PROMPT_LEN, NUM_DECODED, NUM_REPEATS = 512, 32, 64, 5
LIMITS = Limits(load_s=300.0, workload_s=300.0, total_s=1200.0)  # of one kind


def make_model(folder: Path, kind: str, *, is_quick: bool = False, **more: Any) -> None:
    """Write a random model in float32, with a tokenizer; `more` is added to its configuration."""
    import torch
    import transformers

    fields = SIZES | KINDS[kind]
    if is_quick:
        fields |= SMALLER
        if "mamba_n_heads" in fields:
            fields |= {"mamba_n_heads": 2}  # together twice the hidden size
        if "layer_types" in fields:
            types = {name: fields[name][:4] for name in ("layer_types", "mlp_layer_types") if name in fields}
            fields |= types | {"num_hidden_layers": 4}
        if "block_types" in fields:
            fields |= {"num_hidden_layers": len(fields["block_types"])}  # transformers needs one with a cache
    if kind in _WITHOUT_HEAD_DIM:
        for name in ("head_dim", "num_key_value_heads"):
            del fields[name]
    fields |= more
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def load_quire(folder: Path) -> object:
    from quire import LLM

    return LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=NUM_KV_BLOCKS, max_model_len=1024)


def load_transformers(folder: Path) -> object:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)  # as quire does
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


LOADERS = {"quire": load_quire, "transformers": load_transformers}


def import_engines(folder: Path) -> None:
    """Import what the engines use for a model.

    A process does so once, whatever the size of the model. The configurations of some kinds, among them Llama, import
    torch._dynamo and SymPy: 1.6 s and 150 MB, which would be counted for quire with these kinds alone.
    """
    import torch
    import transformers

    from quire import LLM  # noqa: F401

    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


def measure_load(load: Callable[[Path], object], folder: Path) -> dict[str, float]:
    """Load a model in this process. Returns figure |-> value."""
    import_engines(folder)
    weight_gb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = _memory_kib("VmRSS"), time.perf_counter()
    loaded = load(folder)  # kept until the memory is read
    elapsed = time.perf_counter() - started
    peak_gb = (_memory_kib("VmHWM") - before) * 1024 / 1e9
    del loaded
    return {"load_s_per_gb": elapsed / weight_gb, "peak_gb_per_gb": peak_gb / weight_gb}


UNITS = {"load_s_per_gb": "s/GB", "peak_gb_per_gb": "GB/GB"}


def load_apart(engine: str, folder: Path) -> dict[str, Figure]:
    """Measure a load in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.families", "--load", engine, str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: Figure(value, UNITS[name]) for name, value in measured.items()}


def _batches(repetition: int) -> list[Requests]:
    """Return one request each: a prefill, and the same prompt length without and with decoding; all are new."""
    lens = (PREFILL_LEN, 1), (PROMPT_LEN, 1), (PROMPT_LEN, 1 + NUM_DECODED)
    return [single(prompt_len, max_tokens, repetition) for prompt_len, max_tokens in lens]


def _speeds(walls: Walls) -> dict[str, Figure]:
    prefill, first, whole = (median(times) for times in zip(*walls, strict=True))
    return {
        "prefill_tokens_per_s": Figure(PREFILL_LEN / prefill, "tokens/s"),
        "decode_tokens_per_s": Figure(NUM_DECODED / max(whole - first, 1e-9), "tokens/s"),
    }


SPEED = Workload(_batches, _speeds)


def measure_speeds(
    folder: Path, engines: list[str], peers: Path | None, *, counts_processor_time: bool = False
) -> dict[str, Figure]:
    """Measure prefill and decode of the engines by turns. Returns `<engine>.<figure>` |-> figure."""
    options = ["--model-dir", str(folder), "--dtype", "float32", "--threads", str(num_cores())]
    logs = (peers or folder) / "logs"

    def start(name: str, timeout_s: float) -> Engine:
        environments = None if name in LOADERS else peers
        log, counts = logs / f"{name}.log", counts_processor_time
        return Engine(name, environments, options, log, timeout_s, counts_processor_time=counts)

    with Comparison(engines, start, LIMITS, single(PREFILL_LEN, 2, NUM_REPEATS)) as comparison:
        figures = comparison.load()
        speeds = comparison.measure("speed", SPEED, NUM_REPEATS)
    failed = {name: figure for name, figure in figures.items() if name.endswith(".load.failed_after_s")}
    return failed | {name.replace(".speed.", "."): figure for name, figure in speeds.items()}


def measure_kind(
    kind: str, peers: Path | None, *, is_quick: bool, counts_processor_time: bool
) -> dict[str, Figure]:
    """Measure loads and speeds of a kind, or beside llama.cpp speeds. Returns `<engine>.<figure>` |-> figure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, kind, is_quick=is_quick)
        loads = {engine: load_apart(engine, folder) for engine in LOADERS if peers is None}
        figures = {f"{engine}.{key}": own for engine, found in loads.items() for key, own in found.items()}
        engines = [*LOADERS, *(["llama.cpp"] if peers is not None else [])]
        return figures | measure_speeds(folder, engines, peers, counts_processor_time=counts_processor_time)


def _memory_kib(field: str) -> int:
    """Return a field of this process's memory, in KiB. VmHWM does not count the parent's, as getrusage does."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", type=names_from(KINDS), metavar="A,B,...")
    parser.add_argument(
        "--quick", action="store_true", help="models of 64 hidden units, to see that it works"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="measure beside llama.cpp, of this folder")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time")
    parser.add_argument("--load", nargs=2, metavar=("ENGINE", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load is not None:
        engine, folder = arguments.load
        print(json.dumps(measure_load(LOADERS[engine], Path(folder))))
        return
    able = KINDS if arguments.peers is None else LLAMA_CPP
    if unable := set(arguments.kinds or ()) - set(able):
        parser.error(f"--peers: llama.cpp has no {', '.join(sorted(unable))}")
    figures: dict[str, Figure] = {}
    for kind in arguments.kinds or able:
        found = measure_kind(
            kind,
            arguments.peers,
            is_quick=arguments.quick,
            counts_processor_time=arguments.processor_time,
        )
        figures |= {f"families.{kind}.{name}": figure for name, figure in found.items()}
        if arguments.json is not None:  # what is measured survives an interruption
            write_figures(arguments.json, figures)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
