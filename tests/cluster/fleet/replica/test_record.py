"""ReplicaRecord as JSON: it round-trips, and any other text is refused."""

import json

import pytest

from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.proto.errors import ProtocolError

RECORD = ReplicaRecord(
    replica_id="replica-1", model="demo", version="2", endpoint="tcp://10.0.0.1:4000", num_kv_blocks=64,
    namespace="quire", node_ids=("a", "a", "b"), pids=(1, 2, 3),
)  # fmt: skip


def test_record_round_trips_through_json() -> None:
    assert ReplicaRecord.from_json(RECORD.to_json()) == RECORD
    assert RECORD.num_ranks == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"replica_id": "x"}', "\x00"])
def test_text_that_is_not_a_record_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="record cannot be read"):
        ReplicaRecord.from_json(text)


def test_unknown_field_is_refused_by_name() -> None:
    fields = json.loads(RECORD.to_json()) | {"surprise": 1}
    with pytest.raises(ProtocolError, match="surprise"):
        ReplicaRecord.from_json(json.dumps(fields))
