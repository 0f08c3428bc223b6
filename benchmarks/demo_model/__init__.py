"""The bundled demo model, from its texts to its card: `python -m benchmarks.demo_model` makes it."""
