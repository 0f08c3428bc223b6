"""One line about an engine, for the log at its start."""

from __future__ import annotations

from ...proto.config import EngineConfig


def engine_summary(config: EngineConfig) -> str:
    """Return the model, its data types, and how many tokens and sequences fit."""
    model, cache, parallel = config.model, config.cache, config.parallel
    assert cache.num_blocks is not None, "the pool has no size yet"
    num_slots = parallel.num_kv_partitions * (cache.num_blocks - 1) * cache.block_size
    num_sequences = num_slots / config.cache_layout.num_slots(model.max_model_len)
    num_kv_tokens = int(num_sequences * model.max_model_len)
    ranks = f"{parallel.tensor_parallel_size} {'rank' if parallel.tensor_parallel_size == 1 else 'ranks'}"
    kv_dtype = "" if cache.kv_dtype == "auto" else f" in {cache.kv_dtype}"
    return (
        f"{model.name}: {model.architecture} in {model.dtype} on {ranks} ({parallel.device}), "
        f"KV for {num_kv_tokens:,} tokens{kv_dtype}, which are {num_sequences:.1f} sequences of "
        f"{model.max_model_len:,} tokens; at most {config.scheduler.max_num_seqs:,} sequences run at once, with "
        f"{config.scheduler.max_num_batched_tokens:,} tokens per step"
    )
