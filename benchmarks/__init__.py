"""What produces every number in the README: each module is `python -m benchmarks.NAME --json FILE`."""
