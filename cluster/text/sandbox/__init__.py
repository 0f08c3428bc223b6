"""Processes that render and tokenize prompts within limits of time and memory."""
