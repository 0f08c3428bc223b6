"""Families that differ much from the others, each with what only it reads from its configuration."""
