"""Checkpoints, read as each rank's slices, in any storage format."""
