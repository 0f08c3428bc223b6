"""Ops on tensors: PyTorch twins here, Triton kernels in gpu/, C++ ops in native/. Imports nothing else of quire."""
