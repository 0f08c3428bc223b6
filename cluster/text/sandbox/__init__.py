"""Processes that work on what users send, within limits of time and memory."""
