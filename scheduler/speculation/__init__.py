"""Speculative decoding on the scheduler's side: the number of tokens that the ranks draft in each step."""
