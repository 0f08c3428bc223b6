"""Options, their declaration and sources, and the configuration that they resolve to."""
