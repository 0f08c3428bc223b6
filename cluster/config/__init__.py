"""Options, their sources, and the configuration they resolve to."""
