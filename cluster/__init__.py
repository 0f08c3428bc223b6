"""The cluster around the engine: gateways, replicas, fleet, clients and commands. It may import every other folder."""
