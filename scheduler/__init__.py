"""The control plane of a replica.

`core`, `kv` and `sequences` are the scheduler proper: pure Python and numpy, without Ray, ZeroMQ, threads or a clock
(time is passed in), as an import contract in pyproject.toml checks. `service` runs it: the step loop, its mailboxes
and the Ray actor.
"""
