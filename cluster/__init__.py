"""What runs it all: the edge, the replicas, the commands. The only folder that knows every other."""
