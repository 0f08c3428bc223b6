"""The fleet controller: starts, watches, drains and ends replicas."""
