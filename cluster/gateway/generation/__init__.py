"""The generation service: one call from its checks to its last token, whatever the protocol."""
