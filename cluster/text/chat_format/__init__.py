"""Chat output formats: reasoning, content and tool calls in a model's text, parsed incrementally."""
