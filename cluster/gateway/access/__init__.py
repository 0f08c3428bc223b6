"""Who may call: addresses, TLS, tokens, and limits per tenant."""
