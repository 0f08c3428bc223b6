"""The scheduling core: pure functions and state; no Ray, no ZeroMQ, no threads, no clock."""
