"""Exit statuses other than 0. After a signal the status is SIGNALED plus the signal's number."""

FAILED, WRONG_USE, SIGNALED, INTERRUPTED = 1, 2, 128, 130
