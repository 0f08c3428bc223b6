"""Write the table of splits in docs/over_nodes.md: `python -m benchmarks.splits [--check]`.

Its numbers are those of `quire fit --nodes`, for models that are larger than a GPU, from the sizes that their
configurations state.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from quire.cluster.cli.splits import Nodes, Split, best_split, find_splits
from quire.cluster.config.capacity import GIB, Workload
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import gpu_bytes
from quire.cluster.config.model_source import describe_files
from quire.cluster.simulation.step_time import find_device
from quire.worker import make_meta_model, measure_weights

PAGE = Path(__file__).parents[1] / "docs" / "over_nodes.md"
TITLE, NEXT_TITLE = "## What fits", "## On a cluster"
GPUS = "h100", "h200", "b200"
MAX_NODES, GPUS_OF_A_NODE, SEQ_LEN = 4, 8, 4096
WORKLOAD: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "utilization": 0.9}

_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
_LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "quantization_config": _FP8,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384,
    "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
# Title |-> the fields of config.json that determine sizes.
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 405B, bfloat16": _LLAMA,
    "Llama 3.1 405B, fp8": _LLAMA | {"quantization_config": _FP8},
    "DeepSeek V3, fp8": _LATENTS
    | {
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
    },
    "Kimi K2, fp8": _LATENTS
    | {
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163840, "max_position_embeddings": 131072,
    },
    "gpt-oss-120b, MXFP4": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4,
        "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "swiglu_limit": 7.0,
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip


def section() -> str:
    """Return the section of the page."""
    lines = [
        TITLE,
        "",
        "The split with the fewest GPUs that holds a model and a sequence, of up to four nodes of eight, and",
        "the next larger one; of models with latents also the first whose tokens travel to their experts, with",
        "the groups of ranks that attend for their own sequences; and a decode step of up to",
        f"{WORKLOAD['max_num_seqs']} sequences of {SEQ_LEN:,} tokens. Written by `python -m benchmarks.splits`;",
        "`quire fit MODEL --gpu h200 --nodes 2` shows all splits of any model. Times are assumed as in",
        "`quire simulate` without measured coefficients.",
        "",
        "| model | GPU | stages x ranks | weights per GPU | KV tokens | sequences | step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [line for title in MODELS for gpu in GPUS for line in lines_of(title, gpu)]
    lines += [
        "",
        "KV is divided by stages too: a rank has that of its stage's layers. Latents (DeepSeek V3, Kimi K2) are",
        "whole on every rank of a stage; stages divide them, and groups that attend for their own sequences.",
    ]
    return "\n".join([*lines, "", ""])


def lines_of(title: str, gpu: str) -> list[str]:
    """Return the lines of a model on a GPU."""
    return [f"| {title} | {gpu.upper()} | {_cells(split)} |" for split in splits_of(MODELS[title], gpu)]


def splits_of(fields: dict[str, Any], gpu: str) -> list[Split]:
    """Return the split with the fewest GPUs, the next larger one, and the first one whose tokens travel."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        model = describe_files(EngineOptions(folder))
    workload = Workload(**WORKLOAD, dtype_bytes=2, kv_bytes=2)
    weights = measure_weights(model, make_meta_model(model), workload.dtype_bytes)
    nodes = Nodes(MAX_NODES, GPUS_OF_A_NODE)
    found = find_splits(model, weights, nodes, find_device(gpu), gpu_bytes(gpu), workload, SEQ_LEN)
    parts = [split for split in found if not split.whole_experts]
    first = best_split(parts)
    if first is None:
        return []
    size = first.pipeline * first.tensor
    larger = best_split([split for split in parts if split.pipeline * split.tensor > size])
    travelling = best_split([split for split in found if split.attention_groups > 1])
    return [first, *(split for split in (larger, travelling) if split is not None)]


def _cells(split: Split) -> str:
    own = split.capacity
    groups = f", {split.attention_groups} groups" if split.attention_groups > 1 else ""
    return (
        f"{split.pipeline} x {split.tensor}{groups} | {own.weight_bytes / GIB:.1f} GiB | {own.num_kv_tokens:,} | "
        f"{split.num_sequences} | {1e3 * split.step_s:.1f} ms"
    )


def with_section(page: str) -> str:
    """Return the page with the section as it is now."""
    before, rest = page.split(TITLE)
    return before + section() + NEXT_TITLE + rest.split(NEXT_TITLE)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only compare, and exit with 1 if the page differs"
    )
    page, is_check = PAGE.read_text(), parser.parse_args().check
    written = with_section(page)
    if not is_check:
        PAGE.write_text(written)
    elif written != page:
        sys.exit("docs/over_nodes.md is not what `python -m benchmarks.splits` writes")


if __name__ == "__main__":
    main()
