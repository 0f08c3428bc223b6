"""ReplicaRecord: plain data from which another process finds a running replica."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ....proto.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """All that a process needs to find a running replica and connect to it. Kept in a key-value store as JSON.

    Attributes:
        version: version of the deployment, as the owner numbers it.
        endpoint: ZeroMQ endpoint at which the scheduler receives gateways' messages.
        num_kv_blocks: blocks of the KV pool, the scratch block included.
        namespace: Ray namespace of the actors' names.
        node_ids: Ray node ids of the scheduler and then of each rank.
        pids: process ids of the scheduler and then of each rank, as seen on their own hosts.
        device, dtype, max_num_seqs, max_num_batched_tokens: as its configuration has them, which depends on its
            nodes; empty and 0 of a replica of an earlier release.
    """

    replica_id: str
    model: str
    version: str
    endpoint: str
    num_kv_blocks: int
    namespace: str
    node_ids: tuple[str, ...]
    pids: tuple[int, ...]
    device: str = ""
    dtype: str = ""
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.node_ids) - 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ReplicaRecord:
        """Return the record that `to_json` wrote; raise ProtocolError for any other text."""
        try:
            fields = json.loads(text)
            fields["node_ids"], fields["pids"] = tuple(fields["node_ids"]), tuple(fields["pids"])
            return ReplicaRecord(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"a replica's record cannot be read: {error}") from error
