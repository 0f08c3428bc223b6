"""Formats of tool calls, one module per format."""
