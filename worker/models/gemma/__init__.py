"""Decoders of Gemma 3n and 4."""
