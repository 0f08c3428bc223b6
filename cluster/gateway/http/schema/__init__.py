"""Bodies of requests as pydantic models, which name the fields; SamplingParams and Chat check their values."""
