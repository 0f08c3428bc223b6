"""Names of a replica's actors and placement group, by which any process finds them."""

from __future__ import annotations

# Begin of the role of a process that was started before it was known which rank it becomes.
STANDBY_ROLE = "standby-"


def actor_name(replica_id: str, role: str) -> str:
    """Return the name of a replica's actor; the role is ``scheduler``, ``rank-N`` or begins with STANDBY_ROLE."""
    return f"quire/{replica_id}/{role}"


def placement_name(replica_id: str, namespace: str) -> str:
    """Return the name of a replica's placement group.

    The name contains the namespace because Ray lists the groups of all namespaces together, without theirs.
    """
    return f"{namespace}:{actor_name(replica_id, 'place')}"
