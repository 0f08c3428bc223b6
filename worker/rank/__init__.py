"""One rank: its actor, its models, and the runner of steps."""
