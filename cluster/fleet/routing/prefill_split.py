"""Cost model of prefill and decode apart: whether another replica should compute a request's prompt. Pure.

A long prompt delays the request itself, and every sequence that the decode replica runs meanwhile, by as much as
steps with the prompt's chunks are longer than steps without. A prefill replica takes that delay away, at the price
of a transfer. Both are seconds, of this request and of the others alike, and the way with fewer of them is taken. So
an idle decode replica computes even long prompts itself, and a busy one hands off all whose computation costs more
than their transfer.

Rates and queues are those that the replicas measure and send each second. The only constants are the transfer's
fixed cost and the margin, which covers errors of the rates where both ways take about as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ....proto.kv_transfer import PULL_OVERHEAD_S
from ....proto.replica_status import ReplicaStatus

# The split must be expected to save this share of the prompt's time: measured rates vary by a tenth.
MARGIN = 0.1
# A prompt waits at most this many times as long for its first token as it would at the decode replica.
MOST_WAIT = 2.0
# A prefill replica may take this many times as long as expected, and this much longer, before the decode replica
# computes the prompt after all.
LATE_FACTOR, LATE_S = 4.0, 5.0


@dataclass(frozen=True, slots=True)
class PromptAt:
    """A prompt at a replica that may compute it.

    Attributes:
        num_uncached_tokens: tokens of the prompt that must be computed.
        num_queued_tokens: prompt tokens that the replica computes before.
        num_delayed: sequences that the whole time of the prompt delays: each one that waits, since as many will come
            meanwhile, and a share of each one that runs.
        tokens_per_s: measured rate of prompts; 0 if it is unknown.
    """

    num_uncached_tokens: int
    num_queued_tokens: int
    num_delayed: float
    tokens_per_s: float

    @staticmethod
    def of(status: ReplicaStatus, num_sent_tokens: int, num_uncached_tokens: int) -> PromptAt:
        """Return the prompt at a replica to which tokens were sent since its status."""
        return PromptAt(
            num_uncached_tokens,
            status.queued_tokens + num_sent_tokens,
            status.num_waiting + status.num_running * status.prefill_delay,
            status.prefill_tokens_per_s,
        )

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return (self.num_queued_tokens + self.num_uncached_tokens) / self.tokens_per_s

    @property
    def cost_s(self) -> float:
        """Time to the first token, and the delays of others."""
        return self.first_token_s + self.num_delayed * self.num_uncached_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class PullRate:
    """Speed at which a replica reads KV from another one.

    Attributes:
        tokens_per_s: keys and values of tokens; 0 if it is unknown.
        state_s: time of the state after them, in a model whose layers keep one of each sequence.
    """

    tokens_per_s: float
    state_s: float = 0.0

    @staticmethod
    def of(status: ReplicaStatus) -> PullRate:
        """Return the rate that a replica has measured."""
        bytes_per_s = status.kv_pull_bytes_per_s
        if bytes_per_s <= 0 or status.kv_token_bytes <= 0:
            return PullRate(0.0)
        return PullRate(bytes_per_s / status.kv_token_bytes, status.kv_state_bytes / bytes_per_s)

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a pull of tokens; infinite while the rate is unknown."""
        if self.tokens_per_s <= 0:
            return math.inf
        return PULL_OVERHEAD_S + num_tokens / self.tokens_per_s + self.state_s


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """Seconds that a prompt costs.

    Attributes:
        alone_s: if the decode replica computes it.
        apart_s: if the prefill replica does, without the transfer.
        first_token_alone_s, first_token_s: parts of these until the first token.
        transfer_s: time of the KV's transfer, between the first and the second token.
    """

    alone_s: float
    apart_s: float
    first_token_alone_s: float
    first_token_s: float
    transfer_s: float

    @property
    def pays(self) -> bool:
        """Return whether the prefill replica should compute the prompt."""
        is_cheaper = self.apart_s + self.transfer_s < (1 - MARGIN) * self.alone_s
        return is_cheaper and self.first_token_s <= MOST_WAIT * self.first_token_alone_s

    @property
    def patience_s(self) -> float:
        """Time after which the prefill replica is late."""
        return LATE_FACTOR * self.first_token_s + LATE_S


def estimate_split(decode: PromptAt, prefill: PromptAt, pull: PullRate) -> SplitEstimate | None:
    """Return the costs of a prompt's two ways; None while rates are unknown: the decode replica then measures them.

    Args:
        pull: speed at which the decode replica reads.
    """
    # A replica that has not measured its own rate yet is taken for one like the other.
    decode = replace(decode, tokens_per_s=decode.tokens_per_s or prefill.tokens_per_s)
    prefill = replace(prefill, tokens_per_s=prefill.tokens_per_s or decode.tokens_per_s)
    if decode.tokens_per_s <= 0 or pull.tokens_per_s <= 0:
        return None
    transfer_s = pull.seconds(decode.num_uncached_tokens)
    return SplitEstimate(
        decode.cost_s, prefill.cost_s, decode.first_token_s, prefill.first_token_s, transfer_s
    )
