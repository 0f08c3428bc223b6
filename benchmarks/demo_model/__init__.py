"""Training of the bundled demo model, from its texts to its model card: `python -m benchmarks.demo_model`."""
