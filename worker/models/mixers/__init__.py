"""Attention and other layers that read earlier tokens, one file per kind."""
