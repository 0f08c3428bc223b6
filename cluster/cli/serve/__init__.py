"""`quire serve`, on one host or as a fleet."""
