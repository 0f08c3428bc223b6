"""Triton kernels, one op per file: kernels, and the wrapper that checks, allocates and launches.

A wrapper has the name and the signature of its PyTorch reference in ``kernels``, which describes the op. Grids and
allocations depend only on the shapes of tensors, never on their values, so that every op can be captured in a CUDA
graph and replayed with other values. Padding has sequence length 0 and negative slots.

Triton compiles a variant for each argument that is 1 or divisible by 16, and for each alignment of a pointer.
Arguments that change from step to step are not specialized: a new variant stalls the step for seconds.

These files do not import annotations from __future__: Triton reads ``tl.constexpr`` from evaluated annotations.
"""
