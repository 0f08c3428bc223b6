"""Collectives of a tensor-parallel group."""
