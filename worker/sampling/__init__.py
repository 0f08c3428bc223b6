"""From logits to tokens: logits processors, the sampler and log-probabilities."""
