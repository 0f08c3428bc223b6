"""This process and its machine: signals, child processes, cleanup."""
