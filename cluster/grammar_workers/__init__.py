"""Processes that compile grammars within limits of time and memory."""
