"""Training of the bundled vision model, from drawing its pictures: `python -m benchmarks.demo_model.vision`."""
