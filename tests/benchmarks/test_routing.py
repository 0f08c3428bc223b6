"""Routing benchmark: every request is served, and cache-aware routing keeps conversations in place."""

from benchmarks.routing import POLICIES, route
from benchmarks.trace import Trace
from quire.cluster.simulation.traces import BLOCK_TOKENS, TracedRequest


def make_conversations(num_conversations: int, num_turns: int) -> Trace:
    """Return conversations in which each turn's prompt is the previous one with 8 more blocks."""
    requests: list[TracedRequest] = []
    for turn in range(1, num_turns + 1):
        for conversation in range(num_conversations):
            blocks = tuple(1000 * conversation + block for block in range(8 * turn))
            number = len(requests)
            requests.append(TracedRequest(number, 2.0 * number, BLOCK_TOKENS * len(blocks), 4, blocks))
    return Trace("conversations", tuple(requests))


def test_cache_aware_policy_keeps_conversations_with_their_prefix() -> None:
    trace = make_conversations(num_conversations=12, num_turns=5)
    alone, _ = route(trace, 1, "cache_aware")
    rates = {policy: route(trace, 4, policy)[0] for policy in POLICIES}
    assert rates["cache_aware"] > 0.9 * alone
    assert rates["cache_aware"] > 1.5 * rates["random"]
