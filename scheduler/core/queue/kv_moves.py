"""KvMoves: sequences that take their KV along when they leave a replica, or bring it when they come.

A sequence that leaves has its blocks lent (`offer`). One that comes waits, parked, while the ranks pull its blocks
into the prefix cache; then it starts like any other with a cached prefix. Whatever fails, it starts without what is
missing, which is computed.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable

from ....proto.config import EngineConfig
from ....proto.kv_layout import KvLayout, layout_of
from ....proto.kv_transfer import PULL_OVERHEAD_S, KvFailure, KvOffer, KvOrders, KvReport, KvReportKind
from ...kv.block_manager import BlockManager
from ...kv.leases import LEASE_S, MAX_LEASES
from ...kv.pulls import Pull
from ...sequences.sequence import Sequence
from .policy import CostModel

# A rank gives up a pull after this time and what its bytes take at the slowest rate that is worth a pull,
MIN_PULL_TIMEOUT_S = 5.0
SLOWEST_BYTES_PER_S = 50e6
# and the scheduler does so later, if a rank does not report even that.
REPORT_SLACK_S = 2.0
# Until a pull has been measured: what a busy host copies.
FIRST_BYTES_PER_S = 500e6
# The rate is doubled after this time without a pull, up to that: otherwise one slow read, or a first rate that is far
# too low for the network, would prevent all reads. A read that takes longer than expected corrects it at once.
RETRY_S = 10.0
MOST_BYTES_PER_S = 100e9


class NoKvMoves:
    """KV that stays where it is: KvMoves of a replica without `kv_transfer`."""

    kv_layout = b""
    num_kv_leases = num_kv_offers = num_kv_pulls = num_kv_pulled_tokens = num_kv_pulled_bytes = 0
    num_kv_recomputed_tokens = num_kv_ahead_tokens = num_split_prompts = 0
    kv_pull_bytes_per_s = kv_token_bytes = 0.0
    num_kv_failures: tuple[int, ...] = ()
    must_order = False

    def offer(
        self, sequence: Sequence, row: int, tokens: array[int], num_computed: int, now: float
    ) -> KvOffer | None:
        return None

    def offer_part(self, sequence: Sequence, row: int, num_computed: int, now: float) -> KvOffer | None:
        return None

    def begin(self, sequence: Sequence, now: float, num_running: int) -> bool:
        return False

    def fetch(self, sequence: Sequence, now: float, num_running: int) -> None:
        pass

    def take_ready(self, now: float) -> list[Sequence]:
        return []

    def on_start(self, sequence: Sequence) -> None:
        pass

    def discard(self, sequence: Sequence) -> None:
        pass

    def on_reports(self, reports: Iterable[KvReport], now: float, fence_step: int | None) -> None:
        pass

    def expire(self, now: float, fence_step: int | None) -> None:
        pass

    def free_blocks(self, fence_step: int | None) -> bool:
        return False

    def forget(self) -> None:
        pass

    def take_orders(self) -> KvOrders | None:
        return None


class KvMoves:
    """The leases and pulls of one replica.

    Attributes:
        num_kv_pulls, num_kv_pulled_tokens, num_kv_pulled_bytes: of pulls that brought blocks; the bytes are those of
            the rank that read most.
        num_kv_recomputed_tokens: tokens that were to be pulled, and were not.
        num_kv_ahead_tokens: of the pulled tokens, those that came before their sequence.
        num_split_prompts: sequences that left with their first token, as was asked for.
        kv_pull_bytes_per_s: recent rate of the slowest rank.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, costs: CostModel) -> None:
        self._config, self._blocks, self._costs = config, blocks, costs
        self._block_bytes = layout_of(config, 0, "").block_bytes
        self._serving: dict[int, KvReport] = {}  # rank |-> its latest SERVES
        self._layout: KvLayout | None = None  # of all heads; None until all ranks serve
        self._pull_of: dict[
            int, Pull
        ] = {}  # seq_id |-> the pull whose blocks it waits for, or is to start with
        self._parked: dict[int, float] = {}  # seq_id of one that waits |-> since when
        # seq_id |-> sequences that wait for its pull, which brings their blocks too: outputs of one prompt.
        self._followers: dict[int, list[Sequence]] = {}
        # seq_id of a sequence that has not come yet, whose pull fills the prefix cache |-> the sequence
        self._fetches: dict[int, Sequence] = {}
        self._ready: list[Sequence] = []
        self.kv_pull_bytes_per_s = FIRST_BYTES_PER_S
        self._rated_at = -math.inf
        self.num_kv_pulls = self.num_kv_pulled_tokens = self.num_kv_pulled_bytes = 0
        self.num_kv_recomputed_tokens = self.num_kv_ahead_tokens = self.num_split_prompts = 0
        self._failures: Counter[KvFailure] = Counter()

    @property
    def kv_layout(self) -> bytes:
        """Fingerprint of the layout of all heads; empty while the ranks cannot serve."""
        return b"" if self._layout is None else self._layout.fingerprint

    @property
    def num_kv_leases(self) -> int:
        return len(self._blocks.leases)

    @property
    def num_kv_offers(self) -> int:
        return self._blocks.leases.num_granted

    @property
    def num_kv_failures(self) -> tuple[int, ...]:
        """Pulls that lacked some or all of their blocks, by reason, in the order of KvFailure."""
        return tuple(self._failures[reason] for reason in KvFailure) if self._failures else ()

    @property
    def kv_token_bytes(self) -> float:
        """Bytes that a rank reads for a token of all cache groups."""
        return sum(self._block_bytes) / self._blocks.block_size

    @property
    def must_order(self) -> bool:
        """Return whether the ranks are to get a plan, though there may be nothing to compute."""
        # Also while reports are due, which come with results: ranks without anything to compute wait for them.
        leases, pulls = self._blocks.leases, self._blocks.pulls
        return bool(leases) or leases.has_orders or pulls.has_orders or pulls.are_read

    # The replica that a sequence leaves

    def offer(
        self, sequence: Sequence, row: int, tokens: array[int], num_computed: int, now: float
    ) -> KvOffer | None:
        """Lend the full blocks of a running sequence that leaves; None if nobody could use them.

        Args:
            tokens: all known ones.
            num_computed: of these, by the steps so far.
        """
        # The last token is computed again by the next replica, which needs its logits.
        num_blocks = min(num_computed, len(tokens) - 1) // self._blocks.block_size
        if self._layout is None or num_blocks < 1 or sequence.pooling is not None:
            return None
        if len(self._blocks.leases) >= MAX_LEASES:
            return None
        digests = self._blocks.prefixes.digests_of(sequence, tokens, num_blocks)
        table = self._blocks.prefixes.find_lendable(row, digests)
        if table is None:
            return None
        generation = self._blocks.leases.grant(sequence.request_id, table[table != 0].tolist(), now)
        endpoints = tuple(self._serving[rank].name for rank in range(len(self._serving)))
        return KvOffer(
            generation, self._layout.fingerprint, endpoints, digests[-1], num_blocks, table, LEASE_S
        )

    def offer_part(self, sequence: Sequence, row: int, num_computed: int, now: float) -> KvOffer | None:
        """Lend the first tokens of a prompt, of which others are still to be computed.

        Returns None if too few are new for a pull of their own, which has a fixed cost: they come with the next ones.
        """
        num_new, rate = num_computed - sequence.num_lent_tokens, self._costs.prefill_tokens_per_s
        is_small = num_new < self._blocks.block_size or num_new <= PULL_OVERHEAD_S * rate
        if is_small or len(self._blocks.leases) >= MAX_LEASES // 2:
            return None
        sequence.num_lent_tokens = num_computed
        return self.offer(sequence, row, sequence.token_ids, num_computed, now)

    def free_blocks(self, fence_step: int | None) -> bool:
        """Hold no block for others, since sequences lack some; return whether any was held.

        Those are the blocks of leases, and those that were read for sequences which have not started.
        """
        leases = self._blocks.leases
        had_some = bool(leases)
        while leases.end_oldest(fence_step):
            pass
        for pull in self._blocks.pulls:
            if pull.sequence is not None and not pull.reading:
                self.on_start(pull.sequence)  # which finds its blocks in the prefix cache, or computes them
                had_some = True
        return had_some

    # The replica that a sequence comes to

    def begin(self, sequence: Sequence, now: float, num_running: int) -> bool:
        """Begin to pull the blocks of a sequence that is about to start; return whether it has to wait for them.

        Args:
            num_running: other sequences, which computing its tokens would delay.
        """
        offer, sequence.kv = sequence.kv, None
        if offer is None or not self._fits(sequence, offer):
            return False
        if (leader := self._leader_of(offer)) is not None:
            sequence.kv = offer
            self._followers.setdefault(leader.seq_id, []).append(sequence)
            self._parked[sequence.seq_id] = now
            return True
        if not self._pull(sequence, offer, now, num_running):
            return False
        self._parked[sequence.seq_id] = now
        return True

    def fetch(self, sequence: Sequence, now: float, num_running: int) -> None:
        """Begin to pull the blocks of a sequence that is not queued here, and will come with more of them.

        Nobody waits for them, and nothing holds them once they are in the prefix cache. The sequence finds them
        there, or its own pull reads them.
        """
        offer, sequence.kv = sequence.kv, None
        if (
            offer is not None
            and self._fits(sequence, offer)
            and self._pull(sequence, offer, now, num_running)
        ):
            self._fetches[sequence.seq_id] = sequence

    def _pull(self, sequence: Sequence, offer: KvOffer, now: float, num_running: int) -> bool:
        """Begin to pull the blocks that a sequence lacks; return whether that is possible and worth it."""
        lacking, cached = self._blocks.prefixes.find_lacking(sequence, offer.num_blocks)
        coming = self._fetched_blocks()
        wanted = [
            (group, index, int(offer.block_ids[group * offer.num_blocks + index]))
            for group, index in lacking
            if (group, sequence.block_digests[index]) not in coming
        ]
        is_lent = all(source for _, _, source in wanted)
        has_room = len(wanted) + len(cached) <= self._blocks.pool.num_free_in(0)
        if not (wanted and is_lent and has_room and self._pays(wanted, num_running)):
            # The ranks release the lease when the pull ends.
            self._blocks.pulls.cancel(
                self._blocks.pulls.begin(sequence, offer, [], [], now, MIN_PULL_TIMEOUT_S)
            )
            return False
        timeout_s = MIN_PULL_TIMEOUT_S + self._num_bytes(wanted) / SLOWEST_BYTES_PER_S
        pull = self._blocks.pulls.begin(
            sequence, offer, wanted, cached, now + timeout_s + REPORT_SLACK_S, timeout_s
        )
        self._pull_of[sequence.seq_id] = pull
        return True

    def _fetched_blocks(self) -> set[tuple[int, bytes]]:
        """Return (group, digest) of the blocks that fetches are reading.

        Ranks read one pull after the other. So a sequence whose own pull leaves these out has them when its own are
        there. If they fail, it computes from the first that it lacks.
        """
        return {
            (block.group, sequence.block_digests[block.index])
            for sequence in self._fetches.values()
            for block in self._pull_of[sequence.seq_id].targets
        }

    def _leader_of(self, offer: KvOffer) -> Sequence | None:
        """Return a sequence whose pull reads the same blocks."""
        for pull in self._pull_of.values():
            sequence = pull.sequence
            if sequence is not None and pull.reading and offer.digest in sequence.block_digests:
                return sequence
        return None

    def _fits(self, sequence: Sequence, offer: KvOffer) -> bool:
        """Return whether the blocks are those of the sequence's tokens, by layout, weights and digest."""
        num_blocks = offer.num_blocks
        if (
            offer.layout != self.kv_layout
            or not 0 < num_blocks <= sequence.num_reusable_tokens // self._blocks.block_size
        ):
            return False
        if offer.block_ids.size != num_blocks * self._blocks.num_groups or not offer.endpoints:
            return False
        sequence.block_digests = self._blocks.prefixes.digests_of(sequence, sequence.token_ids, num_blocks)
        return sequence.block_digests[-1] == offer.digest

    def _pays(self, wanted: list[tuple[int, int, int]], num_running: int) -> bool:
        """Return whether reading the blocks is expected to cost less time than computing their tokens.

        The steps that compute them delay the running sequences too; a read delays nobody else.
        """
        rate = self._costs.prefill_tokens_per_s
        if rate <= 0:
            return True
        num_tokens = len({index for _, index, _ in wanted}) * self._blocks.block_size
        return PULL_OVERHEAD_S + self._num_bytes(wanted) / self.kv_pull_bytes_per_s < (
            (1 + num_running * self._costs.prefill_delay) * num_tokens / rate
        )

    def _num_bytes(self, wanted: list[tuple[int, int, int]]) -> int:
        """Return the bytes that each rank reads."""
        return sum(self._block_bytes[group] for group, _, _ in wanted)

    def take_ready(self, now: float) -> list[Sequence]:
        """Return the sequences that need not wait any more."""
        ready, self._ready = self._ready, []
        for sequence in ready:
            sequence.transfer_s += now - self._parked.pop(sequence.seq_id, now)
        return ready

    def on_start(self, sequence: Sequence) -> None:
        """Note that a sequence has its row, with its own references to the blocks."""
        pull = self._pull_of.pop(sequence.seq_id, None)
        if pull is not None:
            self._blocks.pulls.cancel(pull)
        self._ready += self._followers.pop(sequence.seq_id, [])

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._ready = [each for each in self._ready if each is not sequence]
        self._parked.pop(sequence.seq_id, None)
        for followers in self._followers.values():
            followers[:] = [each for each in followers if each is not sequence]
        self.on_start(sequence)

    def on_reports(self, reports: Iterable[KvReport], now: float, fence_step: int | None) -> None:
        """Apply what the ranks report."""
        for report in reports:
            match report.kind:
                case KvReportKind.SERVES:
                    self._on_serving(report)
                case KvReportKind.PULLED:
                    self._on_pulled(report, now)
                case KvReportKind.RENEWED:
                    self._blocks.leases.renew(report.number, now)
                case KvReportKind.RELEASED:
                    self._blocks.leases.end(report.number, fence_step)

    def _on_serving(self, report: KvReport) -> None:
        self._serving[report.rank] = report
        if len(self._serving) == self._config.parallel.tensor_parallel_size:
            self._layout = layout_of(self._config, 0, self._serving[0].weights).whole

    def _on_pulled(self, report: KvReport, now: float) -> None:
        pulls = self._blocks.pulls
        pull = pulls.get(report.number)
        if pull is None or report.rank not in pull.reading:
            return
        pull.failed.update(report.failed.tolist())
        pull.problem = pull.problem or report.name
        pull.num_bytes, pull.seconds = max((pull.num_bytes, pull.seconds), (report.num_bytes, report.seconds))
        if not pulls.note_read(pull, report.rank):
            return
        self._count(pull, now)
        sequence = pull.sequence
        if sequence is None:
            pulls.release(pull)
            return
        self._blocks.prefixes.publish_pulled(sequence, pull.complete)
        num_tokens = self._blocks.block_size * len({each.index for each in pull.complete})
        self.num_kv_pulled_tokens += num_tokens
        if sequence.seq_id in self._fetches:
            self.num_kv_ahead_tokens += num_tokens
        self._let_start(sequence)

    def _let_start(self, sequence: Sequence) -> None:
        """Let a sequence start, which waited for its pull; end one that has not come."""
        if self._fetches.pop(sequence.seq_id, None) is None:
            self._ready.append(sequence)
        else:
            self.on_start(sequence)

    def _count(self, pull: Pull, now: float) -> None:
        if pull.complete:
            self.num_kv_pulls += 1
            self.num_kv_pulled_bytes += pull.num_bytes
        if pull.failed:
            self._failures[KvFailure(pull.problem.partition(":")[0])] += 1
            self._count_recomputed(pull, pull.failed)
        if pull.seconds > 0 and pull.num_bytes > 0:
            rate = pull.num_bytes / pull.seconds
            self.kv_pull_bytes_per_s = min(rate, 0.5 * (rate + self.kv_pull_bytes_per_s))
            self._rated_at = now

    def _count_recomputed(self, pull: Pull, places: Iterable[int]) -> None:
        """Count the tokens of blocks that are computed instead."""
        lacking = {pull.targets[place].index for place in places}
        self.num_kv_recomputed_tokens += self._blocks.block_size * len(lacking)

    def expire(self, now: float, fence_step: int | None) -> None:
        """End leases and pulls whose deadline has passed."""
        self._blocks.leases.expire(now, fence_step)
        if now - self._rated_at >= RETRY_S:
            self.kv_pull_bytes_per_s = min(2 * self.kv_pull_bytes_per_s, MOST_BYTES_PER_S)
            self._rated_at = now
        for pull in self._blocks.pulls:
            if pull.sequence is not None and pull.reading and now >= pull.deadline:
                self._failures[KvFailure.TIMEOUT] += 1
                self._count_recomputed(pull, range(len(pull.targets)))
                sequence = pull.sequence
                self._let_start(sequence)
                self.on_start(sequence)

    # Both

    def forget(self) -> None:
        """End all leases and pulls: the ranks have forgotten them, or the KV is void. No step is in flight."""
        self._blocks.leases.forget()
        waiting = [each for each in self._blocks.pulls.forget() if each.seq_id in self._parked]
        waiting += [each for followers in self._followers.values() for each in followers]
        self._followers.clear()
        self._ready += [each for each in waiting if each not in self._ready]
        self._pull_of.clear()
        self._fetches.clear()
        self._serving.clear()
        self._layout = None

    def take_orders(self) -> KvOrders | None:
        """Return what the next plan orders the ranks to do."""
        leases, pulls = self._blocks.leases, self._blocks.pulls
        if not (leases.has_orders or pulls.has_orders):
            return None
        grants, revoked = leases.take()
        orders, ended = pulls.take()
        return KvOrders(revoked, grants, orders, ended)


def make_kv_moves(config: EngineConfig, blocks: BlockManager, costs: CostModel) -> KvMoves | NoKvMoves:
    """Return the moves of a replica, if its blocks can leave it: they have names, and each rank has all layers."""
    cache = config.cache
    is_whole = config.parallel.num_kv_partitions == config.parallel.pipeline_parallel_size == 1
    can_move = is_whole and cache.prefix_caching and not config.model.has_states
    return KvMoves(config, blocks, costs) if cache.moves_kv and can_move else NoKvMoves()
