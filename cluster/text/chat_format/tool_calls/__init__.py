"""Formats of tool calls, declared with what reads, detects and forces them."""
