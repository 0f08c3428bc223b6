"""Messages of KV that travels: what a scheduler offers, what it orders its ranks to do, and what these report.

A sequence that leaves a replica may take its blocks along. The replica's scheduler holds them under a *lease* and
puts a KvOffer into the sequence's Finish; the gateway passes it on in the Submit to the next replica. There the
scheduler allocates blocks and orders its ranks to *pull*. They read from the ranks that hold the lease, and verify
afterwards that the lease still holds and that the bytes are those that were sent.

The state after the blocks of a model whose layers keep one of each sequence travels with them. Among the numbers of
blocks its slot s stands as -s, in a last group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .block_tables import IntArray
from .codec import NO_INTS
from .later_fields import sent_if_set

# Cost of a pull whatever its length: two plans, and the messages between the ranks.
PULL_OVERHEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class KvOffer:
    """The blocks of a sequence that left a replica, and where they are.

    Attributes:
        generation: number of the lease, which no other lease of those ranks has.
        layout: fingerprint of the layout of all heads; a replica with another one cannot use the blocks.
        endpoints: rank |-> where it serves its part of the blocks.
        digest: digest of the chain of tokens up to the last block, with model, tenant, salt and adapter in its root.
        num_blocks: full blocks of the sequence.
        block_ids: equally many of each cache group, one group after the other; 0 for those behind a window.
        lease_s: time that the blocks stay unless the lease is renewed, which each read does.
        state_slot: of the state after these blocks; 0 for none.
    """

    generation: int
    layout: bytes
    endpoints: tuple[str, ...]
    digest: bytes
    num_blocks: int
    block_ids: IntArray
    lease_s: float
    state_slot: int = sent_if_set(0)


@dataclass(frozen=True, slots=True)
class KvGrant:
    """A lease that the ranks serve from now on. The steps before have written its blocks."""

    generation: int
    block_ids: IntArray


@dataclass(frozen=True, slots=True)
class KvPull:
    """Blocks that each rank reads from the ranks of another replica.

    Attributes:
        generation, endpoints: as in KvOffer.
        group_lens: blocks of each cache group, in the order of `sources`, and 1 more if a state is read.
        sources: the other replica's blocks.
        targets: this replica's, as many.
        timeout_s: a rank that has not read all in this time reports the rest as failed.
    """

    pull_id: int
    generation: int
    endpoints: tuple[str, ...]
    group_lens: IntArray
    sources: IntArray
    targets: IntArray
    timeout_s: float


@dataclass(frozen=True, slots=True)
class KvOrders:
    """Orders of a plan beside its step, which the ranks carry out before they move or compute anything.

    Attributes:
        revoked: generations of leases that end: later steps may write their blocks.
        ended: pulls that are not waited for any more. A rank that still reads for one stops, and reports it; rank 0
            releases the lease.
    """

    revoked: IntArray = sent_if_set(NO_INTS)
    grants: tuple[KvGrant, ...] = sent_if_set(())
    pulls: tuple[KvPull, ...] = sent_if_set(())
    ended: IntArray = sent_if_set(NO_INTS)


class KvFailure(StrEnum):
    """Reason why blocks were not pulled; the replica computes them instead.

    UNREACHABLE: no rank answers at the endpoint. STALE: the lease has ended. CORRUPT: the checksum differs. TIMEOUT:
    the peer does not answer any more, or not in time. REFUSED: the layouts differ. CANCELED: nobody waits for them.
    """

    UNREACHABLE = "unreachable"
    STALE = "stale"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    CANCELED = "canceled"


class KvReportKind(StrEnum):
    """Kind of a KvReport.

    SERVES: the rank serves its blocks. PULLED: it writes no block of a pull any more. RENEWED, RELEASED: a reader
    uses a lease, or needs it no more.
    """

    SERVES = "serves"
    PULLED = "pulled"
    RENEWED = "renewed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class KvReport:
    """An event at a rank since its previous result.

    Attributes:
        number: the pull, or the generation of the lease.
        name: SERVES: the endpoint. PULLED: a KvFailure, and after a colon which peer did what; empty if none failed.
        weights: SERVES: digest of the weights that are loaded.
        failed: PULLED: places in the pull's `targets` of the blocks that do not have their content.
        num_bytes, seconds: PULLED: what was read, and how long it took. SERVES: the bytes of a state on the rank.
    """

    rank: int
    kind: KvReportKind
    number: int = 0
    name: str = sent_if_set("")
    weights: str = sent_if_set("")
    failed: IntArray = sent_if_set(NO_INTS)
    num_bytes: int = sent_if_set(0)
    seconds: float = sent_if_set(0.0)
