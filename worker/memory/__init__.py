"""A rank's memory: KV cache, host memory and copies between host and device."""
