"""Records that the ranks of a replica have logged at their start, in the log of the process that launched them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ....worker.rank.start_log import StartRecord


def log_start(replica_id: str, records: Sequence[Sequence[StartRecord]]) -> None:
    """Log each record once, with the ranks that have logged it if these are not all.

    Args:
        records: by rank.
    """
    ranks: dict[StartRecord, list[str]] = {}
    for rank, of_rank in enumerate(records):
        for record in dict.fromkeys(of_rank):
            ranks.setdefault(record, []).append(str(rank))
    for record, own in ranks.items():
        origin = replica_id
        if len(own) < len(records):
            origin += f", {'rank' if len(own) == 1 else 'ranks'} {', '.join(own)}"
        logging.getLogger(record.logger).log(record.level, "%s: %s", origin, record.message)
