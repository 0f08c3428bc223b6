"""quire.v1 on the wire: conversions between protobuf and Python, statuses, credentials."""
