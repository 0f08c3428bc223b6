"""Model definitions: decoders of quire, and models of transformers on paged caches."""
