"""Offline inference: the LLM class."""
