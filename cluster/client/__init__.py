"""Client and AsyncClient: the Python clients of quire.v1."""
