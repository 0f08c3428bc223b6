"""The waiting sequences: their order, deadlines, expected work and adapters."""
