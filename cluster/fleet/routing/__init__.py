"""Choice of the replica of a request: pure functions of the replicas' states, for gateways and simulations."""
