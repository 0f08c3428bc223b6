"""Models: their specification, formats and sizes, read from a configuration. No torch."""
