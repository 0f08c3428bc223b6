"""One rank: its shard of the weights, its shard of the KV cache, and the step it executes."""
