"""Bundled demo model and the program behind `make demo`."""
