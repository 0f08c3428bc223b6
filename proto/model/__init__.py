"""What a model is: its specification, its formats and its sizes, read from a configuration. No torch."""
