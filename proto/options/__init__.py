"""Options: their declaration, the values that they may have, and the declared options of an engine."""
