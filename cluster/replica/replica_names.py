"""Names of a replica's actors and placement group, by which any process finds them."""

from __future__ import annotations


def actor_name(replica_id: str, role: str) -> str:
    """Return the name of a replica's actor; the role is ``scheduler`` or ``rank-N``."""
    return f"quire/{replica_id}/{role}"


def placement_name(replica_id: str, namespace: str) -> str:
    """Return the name of a replica's placement group.

    The name contains the namespace because Ray lists the groups of all namespaces together, without theirs.
    """
    return f"{namespace}:{actor_name(replica_id, 'place')}"
