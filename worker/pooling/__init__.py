"""Pooling: one vector per prompt, of its hidden states."""
