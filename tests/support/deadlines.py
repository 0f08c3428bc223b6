"""Deadlines of tests that start servers or other programs. They only end what hangs, so they allow for any load."""

# On two cores with a load of 25 to 45, a server of two ranks was not ready after 120 s.
READY_TIMEOUT_S = 240.0
# For a program, most of whose time is the import of torch or Ray: 156 s there. Less than pytest's own 300 s.
PROGRAM_TIMEOUT_S = 240.0
# For a program that starts a server with several processes, works and stops it.
COMMAND_TIMEOUT_S = 400.0
# For a call of a server in the same process, and for threads; httpx gives up after 5 s otherwise.
CALL_TIMEOUT_S = 60.0
# For one test, with the start of the servers that it shares.
TEST_TIMEOUT_S = 900
