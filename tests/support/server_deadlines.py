"""Deadlines of tests that start whole servers."""

# On two cores with a load of 25 to 45, a server of two ranks was not ready after 120 s.
READY_TIMEOUT_S = 240.0
# For a command that starts a server, or calls one, and ends.
COMMAND_TIMEOUT_S = 400.0
# For one test, with the start of the servers that it shares.
TEST_TIMEOUT_S = 900
