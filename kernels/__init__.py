"""Tensors in, tensors out: plain PyTorch ops, their Triton kernels in gpu/. Imports nothing else of quire."""
