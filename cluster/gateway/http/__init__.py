"""HTTP server of a gateway: the protocols of OpenAI and Anthropic, and pages for operators."""
