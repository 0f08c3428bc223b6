"""Which replica gets a request: pure functions of the replicas' states, for gateways and simulations."""
