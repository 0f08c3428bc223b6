"""The line about an engine, for the log."""

from __future__ import annotations

from fakes import small_config


def test_summary_names_model_memory_and_concurrency() -> None:
    config = small_config(num_blocks=33, block_size=4, max_model_len=64, max_num_seqs=8)
    assert config.summary == (
        "fake: Fake in float32 on 1 rank (cpu), KV for 128 tokens, which are 2.0 sequences of 64 tokens; "
        "at most 8 sequences run at once, with 16 tokens per step"
    )


def test_summary_counts_the_tokens_of_all_ranks_with_dp_attention() -> None:
    config = small_config(num_blocks=33, block_size=4, max_model_len=64, num_kv_partitions=4)
    assert "on 4 ranks (cpu), KV for 512 tokens, which are 8.0 sequences" in config.summary
