"""Kernels of other libraries where they are installed and fit; those of quire are the fallback and the reference."""
