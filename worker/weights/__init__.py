"""Weights: checkpoints, of which each rank reads its slices, and quantized storage formats."""
