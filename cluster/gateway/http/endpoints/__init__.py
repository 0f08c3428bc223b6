"""Endpoints by family, one router per file."""
