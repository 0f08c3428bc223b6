"""KvMoves: sequences that take their KV along when they leave a replica, or bring it when they come.

A sequence that leaves has its blocks lent (`offer`). One that comes waits, parked, while the ranks pull its blocks
into the prefix cache; then it starts like any other with a cached prefix. Whatever fails, it starts without what is
missing, which is computed.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from ....proto.block_tables import IntArray
from ....proto.config import EngineConfig
from ....proto.kv_layout import KvLayout, layout_of
from ....proto.kv_transfer import PULL_OVERHEAD_S, KvFailure, KvOffer, KvOrders, KvReport, KvReportKind
from ....proto.stream import Submit
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
# Tokens of the prompts that are known because their blocks are fetched: 16 MB.
MAX_FETCHED_TOKENS = 4 << 20


class NoKvMoves:
    """KV that stays where it is: KvMoves of a replica without `kv_transfer`."""

    kv_layout = b""
    num_kv_leases = num_kv_offers = num_kv_pulls = num_kv_pulled_tokens = num_kv_pulled_bytes = 0
    num_kv_recomputed_tokens = num_kv_ahead_tokens = num_split_prompts = 0
    kv_pull_bytes_per_s = kv_token_bytes = 0.0
    kv_state_bytes = 0
    num_kv_failures: tuple[int, ...] = ()
    must_order = False

    def offer(
        self, sequence: Sequence, row: int, tokens: array[int], num_computed: int, now: float
    ) -> KvOffer | None:
        return None

    def offer_part(self, sequence: Sequence, row: int, num_computed: int, now: float) -> KvOffer | None:
        return None

    def lend(self, sequence: Sequence, now: float) -> KvOffer | None:
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
        kv_state_bytes: that a rank reads for a state; 0 until all ranks serve.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, costs: CostModel) -> None:
        self._config, self._blocks, self._costs = config, blocks, costs
        self._block_bytes = layout_of(config, 0, "").block_bytes
        self._serving: dict[int, KvReport] = {}  # rank |-> its latest SERVES
        self._layout: KvLayout | None = None  # of all heads; None until all ranks serve
        self.kv_state_bytes = 0
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
        # So do blocks that are loaded for a lease: they are held until a plan has loaded them.
        leases, pulls = self._blocks.leases, self._blocks.pulls
        is_open = bool(leases) or leases.has_orders or pulls.has_orders or pulls.are_read
        return is_open or self._blocks.has_loads

    # The replica that a sequence leaves

    def offer(
        self, sequence: Sequence, row: int, tokens: array[int], num_computed: int, now: float
    ) -> KvOffer | None:
        """Lend the full blocks of a running sequence that leaves; None if nobody could use them.

        In a model that keeps states those up to its last snapshot, and this one.

        Args:
            tokens: all known ones.
            num_computed: of these, by the steps so far.
        """
        digests = self._digests_to_lend(sequence, tokens, num_computed)
        return self._offer(sequence, row, self._up_to_snapshot(digests), now, with_state=True)

    def _digests_to_lend(self, sequence: Sequence, tokens: array[int], num_computed: int) -> list[bytes]:
        """Return the digests of a running sequence's full blocks; none if it cannot leave with them."""
        # The last token is computed again by the next replica, which needs its logits.
        num_blocks = min(num_computed, len(tokens) - 1) // self._blocks.block_size
        if self._layout is None or num_blocks < 1 or sequence.pooling is not None:
            return []
        return self._blocks.prefixes.digests_of(sequence, tokens, num_blocks)

    def _up_to_snapshot(self, digests: list[bytes]) -> list[bytes]:
        """Return the digests up to the last after whose block there is a snapshot; all in a model without states."""
        slots = self._blocks.state_slots
        if not slots.is_on:
            return digests
        ends = range(len(digests), 0, -1)
        return digests[: next((end for end in ends if slots.has(digests[end - 1])), 0)]

    def _offer(
        self, sequence: Sequence, row: int, digests: list[bytes], now: float, *, with_state: bool
    ) -> KvOffer | None:
        """Lend the first full blocks of a row, and the state after them if the model keeps any."""
        if not digests or len(self._blocks.leases) >= MAX_LEASES:
            return None
        table = self._blocks.prefixes.find_lendable(row, digests)
        return None if table is None else self._grant(sequence, digests, table, now, with_state=with_state)

    def _grant(
        self,
        sequence: Sequence,
        digests: list[bytes],
        table: IntArray,
        now: float,
        *,
        are_loaded: bool = False,
        with_state: bool = True,
    ) -> KvOffer | None:
        """Lend blocks; None if the state after them cannot be lent.

        Args:
            digests: of the first full blocks of the sequence.
            table: those blocks, equally many of each group, 0 for those behind a window.
            are_loaded: as for Leases.grant.
            with_state: in a model that keeps states.
        """
        state_slot, slots = 0, self._blocks.state_slots
        if slots.is_on and with_state:
            loan = slots.lend(digests[-1])
            if loan is None:
                return None
            state_slot, is_loaded = loan
            are_loaded |= is_loaded
        block_ids = table[table != 0].tolist()
        generation = self._blocks.leases.grant(
            sequence.request_id, block_ids, now, are_loaded=are_loaded, state_slot=state_slot
        )
        endpoints = tuple(self._serving[rank].name for rank in range(len(self._serving)))
        return KvOffer(
            generation, self.kv_layout, endpoints, digests[-1], len(digests), table, LEASE_S, state_slot
        )

    def lend(self, sequence: Sequence, now: float) -> KvOffer | None:
        """Lend the first full blocks of a prompt that are cached here; None if there are none.

        The plan after the one that loads blocks from host memory lends them. A replica lends nothing while its own
        sequences hold most of its blocks: those that wait may need what is cached.
        """
        pool = self._blocks.pool
        is_full = 2 * pool.num_free_in(0) < self._blocks.num_blocks
        if self._layout is None or is_full or len(self._blocks.leases) >= MAX_LEASES // 2:
            return None
        num_blocks = sequence.num_reusable_tokens // self._blocks.block_size
        digests = self._blocks.prefixes.digests_of(sequence, sequence.token_ids, num_blocks)
        sequence.block_digests = digests
        num_cached = self._blocks.prefixes.num_cached_blocks(sequence, num_blocks)
        wanted = self._up_to_snapshot(digests[:num_cached])
        table, are_loaded = self._blocks.lend_cached(sequence, wanted)
        found = wanted[: table.size // self._blocks.num_groups]
        if not found or self._up_to_snapshot(found) != found:
            return None  # device memory has no room for what comes from host memory
        return self._grant(sequence, found, table, now, are_loaded=are_loaded)

    def offer_part(self, sequence: Sequence, row: int, num_computed: int, now: float) -> KvOffer | None:
        """Lend the first tokens of a prompt, of which others are still to be computed, without a state.

        Returns None if too few are new for a pull of their own, which has a fixed cost: they come with the next ones.
        """
        num_new, rate = num_computed - sequence.num_lent_tokens, self._costs.prefill_tokens_per_s
        is_small = num_new < self._blocks.block_size or num_new <= PULL_OVERHEAD_S * rate
        if is_small or len(self._blocks.leases) >= MAX_LEASES // 2:
            return None
        sequence.num_lent_tokens = num_computed
        digests = self._digests_to_lend(sequence, sequence.token_ids, num_computed)
        return self._offer(sequence, row, digests, now, with_state=False)

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
        slots, state_slot = self._blocks.state_slots, 0
        lacks_state = slots.is_on and offer.state_slot > 0 and not slots.has(offer.digest)
        num_bytes = self._num_bytes(wanted) + lacks_state * self.kv_state_bytes
        num_tokens = self._num_saved_tokens(sequence, offer, wanted, lacks_state=lacks_state)
        is_worth_it = is_lent and has_room and self._pays(num_tokens, num_bytes, num_running)
        if is_worth_it and lacks_state:
            state_slot = slots.take_slot() or 0
            is_worth_it = state_slot > 0
        if not is_worth_it or not (wanted or state_slot):
            # The ranks release the lease when the pull ends.
            self._blocks.pulls.cancel(
                self._blocks.pulls.begin(sequence, offer, [], [], now, MIN_PULL_TIMEOUT_S)
            )
            return False
        timeout_s = MIN_PULL_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S
        deadline = now + timeout_s + REPORT_SLACK_S
        pull = self._blocks.pulls.begin(sequence, offer, wanted, cached, deadline, timeout_s, state_slot)
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

    def _num_saved_tokens(
        self, sequence: Sequence, offer: KvOffer, wanted: list[tuple[int, int, int]], *, lacks_state: bool
    ) -> int:
        """Return the tokens that need not be computed after a read."""
        if lacks_state:
            num_cached_tokens = self._blocks.prefixes.num_cached_tokens(sequence)
            return max(0, offer.num_blocks * self._blocks.block_size - num_cached_tokens)
        return len({index for _, index, _ in wanted}) * self._blocks.block_size

    def _pays(self, num_tokens: int, num_bytes: int, num_running: int) -> bool:
        """Return whether reading bytes is expected to cost less time than computing their tokens.

        The steps that compute them delay the running sequences too; a read delays nobody else.
        """
        rate = self._costs.prefill_tokens_per_s
        if rate <= 0:
            return True
        return PULL_OVERHEAD_S + num_bytes / self.kv_pull_bytes_per_s < (
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
            self.kv_state_bytes = max(each.num_bytes for each in self._serving.values())

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
        if (state := pull.complete_state) is not None:
            num_saved = len(sequence.block_digests) * self._blocks.block_size
            self._blocks.state_slots.publish_pulled(*state, num_saved)
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
        if pull.complete or pull.complete_state is not None:
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
        lacking = {pull.targets[place].index for place in places if place < len(pull.targets)}
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


class FetchedPrompts:
    """Prompts whose blocks are fetched while the rest is computed elsewhere: a gateway sends each of them once.

    Args:
        max_tokens: of all prompts; the longest unused are forgotten, and later fetches of theirs do nothing.
    """

    def __init__(self, max_tokens: int = MAX_FETCHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._submits: OrderedDict[tuple[bytes, int], Submit] = (
            OrderedDict()
        )  # (gateway, handle) |-> the first
        self._num_tokens = 0

    def complete(self, gateway: bytes, submit: Submit) -> Submit | None:
        """Return a fetch with its prompt; None if it has none and no earlier one with its handle is known."""
        key, num_tokens = (gateway, submit.handle), len(submit.prompt_token_ids)
        known = self._submits.pop(key, None)
        if num_tokens:
            self._num_tokens += num_tokens - (0 if known is None else len(known.prompt_token_ids))
            known = submit
        if known is None:
            return None
        self._submits[key] = known
        while self._num_tokens > self._max_tokens and len(self._submits) > 1:
            _, oldest = self._submits.popitem(last=False)
            self._num_tokens -= len(oldest.prompt_token_ids)
        return replace(known, kv=submit.kv)


def make_kv_moves(config: EngineConfig, blocks: BlockManager, costs: CostModel) -> KvMoves | NoKvMoves:
    """Return the moves of a replica, if its blocks can leave it: they have names, and each rank has all layers."""
    cache = config.cache
    is_whole = config.parallel.num_kv_partitions == config.parallel.pipeline_parallel_size == 1
    can_move = cache.moves_kv and is_whole and cache.prefix_caching
    return KvMoves(config, blocks, costs) if can_move else NoKvMoves()
