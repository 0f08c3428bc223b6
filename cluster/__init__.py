"""The cluster around the engine: gateways, replicas, fleet, clients and commands. Imports every other folder."""
