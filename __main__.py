"""`python -m quire`: the command `quire`."""

from quire.cluster.cli import main

main()
