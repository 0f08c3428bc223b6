"""KV cache blocks: the pool, the prefix cache, the host tier and their manager."""
