"""The bundled demo model, and `make demo`."""
