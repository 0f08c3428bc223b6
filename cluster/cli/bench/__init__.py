"""`quire bench`: a load generator for servers and offline engines, and its reports."""
