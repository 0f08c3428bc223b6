"""Batch files in OpenAI's format, run against an HTTP server."""
