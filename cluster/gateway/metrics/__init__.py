"""Metrics of a gateway: their definitions, their values, their exposition, and the files generated from them."""
