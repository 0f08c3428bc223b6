"""Tensors in, tensors out: one op a file, a Triton kernel with its plain PyTorch twin. Imports nothing of quire."""
