"""HotPrefixes: what recent prompts had in common, with its tokens. Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....proto.codec import NO_INTS
from ....proto.sampling import SamplingParams
from ...text.requests.request import Request

# Bounds of what is remembered: 4 MB of tokens.
MAX_PREFIXES = 256
MAX_TOKENS = 1 << 20
# A prefix is hot if so many prompts have continued it, the last one within this time.
MIN_HITS = 2
RECENT_S = 600.0


@dataclass(slots=True)
class HotPrefix:
    """Full blocks with which several prompts began.

    Attributes:
        request: these tokens and the next one, with tenant, salt and adapter.
        hashes: of the blocks, as routers know them.
        num_hits: prompts that continued them.
        hit_at: when the last of these came.
    """

    request: Request
    hashes: tuple[bytes, ...]
    num_hits: int
    hit_at: float

    def first(self, num_blocks: int, block_size: int) -> Request:
        """Return the request of the first blocks alone."""
        tokens = self.request.prompt_token_ids[: num_blocks * block_size + 1]
        return replace(self.request, prompt_token_ids=tokens)


class HotPrefixes:
    """The prefixes that the latest prompts found cached at their replicas, the longest unused forgotten first.

    A turn of a conversation continues a prefix that no other prompt has, so that one hit tells nothing: what several
    prompts begin with, a system prompt or a document, is worth having at another replica too.

    Args:
        block_size: tokens per KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes: OrderedDict[bytes, HotPrefix] = OrderedDict()  # hash of its last block |-> prefix
        self._num_tokens = 0

    def note(self, request: Request, hashes: Sequence[bytes], num_cached_blocks: int, now: float) -> None:
        """Count a prompt of which so many blocks are cached at the replica that it is sent to."""
        num_blocks = min(num_cached_blocks, (len(request.prompt_token_ids) - 1) // self._block_size)
        if num_blocks < 1 or request.media or request.pooling is not None:
            return
        key = hashes[num_blocks - 1]
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            tokens = request.prompt_token_ids[: num_blocks * self._block_size + 1].copy()
            alone = replace(
                request,
                prompt_token_ids=tokens,
                generated_token_ids=NO_INTS,
                sampling=SamplingParams(max_tokens=1),
                constraint=None,
                timeout_s=None,
            )
            prefix = HotPrefix(alone, tuple(hashes[:num_blocks]), 0, now)
            self._num_tokens += len(tokens)
        prefix.num_hits, prefix.hit_at = prefix.num_hits + 1, now
        self._prefixes[key] = prefix
        while len(self._prefixes) > MAX_PREFIXES or self._num_tokens > MAX_TOKENS:
            _, oldest = self._prefixes.popitem(last=False)
            self._num_tokens -= len(oldest.request.prompt_token_ids)

    def hottest(self, now: float) -> list[HotPrefix]:
        """Return the hot prefixes, those first whose hits have saved the most tokens."""
        hot = [
            each
            for each in self._prefixes.values()
            if each.num_hits >= MIN_HITS and now - each.hit_at <= RECENT_S
        ]
        return sorted(hot, key=lambda each: -each.num_hits * len(each.hashes))
