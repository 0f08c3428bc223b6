"""The Python client of quire.v1."""
