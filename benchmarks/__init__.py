"""Benchmarks behind every published number: each module runs as `python -m benchmarks.NAME --json FILE`."""
