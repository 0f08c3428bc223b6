"""Replicas as a gateway knows them, the choice among them, and the migration of requests."""
