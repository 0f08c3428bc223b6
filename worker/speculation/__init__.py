"""Speculative decoding on the ranks: proposal of drafted tokens, and their verification."""
