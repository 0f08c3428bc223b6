"""What crosses a process border, and nothing else: no torch, no Ray."""
