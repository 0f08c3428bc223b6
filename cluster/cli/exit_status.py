"""Exit statuses other than 0."""

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
