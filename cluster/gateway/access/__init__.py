"""Access to a gateway: addresses, TLS, tokens, and limits per tenant."""
