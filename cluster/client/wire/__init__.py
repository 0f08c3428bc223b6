"""quire.v1 for the gateway and the clients: message conversions, status types, error statuses and bearer tokens."""
