"""Text of requests and outputs: chat templates, tokenizers, output formats, and a sandbox for hostile text."""
