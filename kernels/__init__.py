"""Ops on tensors: PyTorch references, Triton kernels in gpu/, C++ ops in native/. Imports nothing else of quire."""
