"""Models of transformers on paged caches."""
