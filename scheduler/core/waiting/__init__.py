"""The waiting queue: its order, its deadlines and its backlog."""
