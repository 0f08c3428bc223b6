"""Commands of operators: drains, sleep, updates and the map of blocks."""
