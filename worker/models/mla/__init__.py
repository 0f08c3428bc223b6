"""Multi-head latent attention (MLA) and its indexer."""
