"""KV cache blocks: block pool, prefix cache, host tier and their manager."""
