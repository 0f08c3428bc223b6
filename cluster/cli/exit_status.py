"""What the command's exit status says, beside 0."""

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
