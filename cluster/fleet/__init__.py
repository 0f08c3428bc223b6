"""The processes of a fleet: the controller, replicas, and Ray below them."""
