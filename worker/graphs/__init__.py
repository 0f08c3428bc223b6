"""CUDA graphs of decode steps."""
