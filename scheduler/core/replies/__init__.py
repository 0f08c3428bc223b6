"""The requests of gateways, and the messages and tokens that are kept for them."""
