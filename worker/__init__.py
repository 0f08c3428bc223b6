"""One tensor-parallel rank: its shard of the weights and of the KV cache, and the execution of steps."""
