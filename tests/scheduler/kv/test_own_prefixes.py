"""The part of a cached prefix that a tenant is told of."""

from __future__ import annotations

from array import array

from quire.proto.sampling import SamplingParams
from quire.scheduler.kv.own_prefixes import OwnPrefixes
from quire.scheduler.sequences.sequence import Sequence


def sequence(tenant: str, digests: str, pool: str = "metals") -> Sequence:
    made = Sequence(
        1, 1, b"", 1, "", SamplingParams(), 0, 8, 9, array("i"), (), 0.0, tenant=tenant, prefix_pool=pool
    )
    made.block_digests = [digest.encode() for digest in digests]
    return made


def test_only_the_tenants_own_leading_blocks_are_counted() -> None:
    own = OwnPrefixes(4)
    own.add(sequence("gold", "abc"))
    own.add(sequence("tin", "ad"))
    assert own.num_tokens(sequence("gold", "abc"), 12) == 12
    assert own.num_tokens(sequence("gold", "abc"), 9) == 8
    assert own.num_tokens(sequence("tin", "abc"), 12) == 4
    assert own.num_tokens(sequence("iron", "abc"), 12) == 0


def test_without_a_pool_all_cached_tokens_are_the_tenants_own() -> None:
    own = OwnPrefixes(4)
    own.add(sequence("gold", "abc", pool=""))
    assert own.num_tokens(sequence("gold", "abc", pool=""), 11) == 11
    assert own.num_tokens(sequence("gold", "abc"), 11) == 0


def test_oldest_blocks_are_forgotten() -> None:
    own = OwnPrefixes(4, max_blocks=3)
    own.add(sequence("gold", "ab"))
    own.add(sequence("gold", "a"))
    own.add(sequence("gold", "cd"))
    assert own.num_tokens(sequence("gold", "a"), 4) == 4
    assert own.num_tokens(sequence("gold", "b"), 4) == 0
