"""Compilation of the kernels of an engine ahead of time, on a machine without its GPUs."""
