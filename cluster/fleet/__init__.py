"""The fleet: replicas that come and go with the load, and requests that find them."""
