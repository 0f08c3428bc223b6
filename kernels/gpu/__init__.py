"""The Triton kernels, one op a file: kernels and the wrapper that checks, allocates and launches.

A wrapper has the name and the signature of the PyTorch twin in ``kernels`` that says what it computes. Grids and
allocations depend on the shapes of tensors alone, never on their values, so that every op can be captured in a CUDA
graph and replayed with others; padding is rows of length 0 and slots below 0.

These files evaluate their annotations, which is how Triton knows a ``tl.constexpr``.
"""
