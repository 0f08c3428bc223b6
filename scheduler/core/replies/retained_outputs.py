"""RetainedOutputs: tokens of sequences that have ended, for gateways that continue another gateway's requests."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.codec import FrameCodec
from ....proto.digests import content_digest
from ....proto.lora import LoraReference
from ....proto.media import MediaItem
from ....proto.sampling import SamplingParams
from ....proto.stream import Finish, Recall, RecalledOutput
from ...sequences.sequence import Sequence

# A client connects to another gateway within seconds; a proxy in between may take longer.
RETENTION_S = 60.0
# 16 million tokens, prompts included.
MAX_BYTES = 64 << 20
# Estimate of an output's memory beside its frame, measured with sys.getsizeof.
_ENTRY_BYTES = 500


@dataclass(frozen=True, slots=True)
class KnownOutput:
    """The tokens of an output that a gateway may ask for.

    Attributes:
        seed: of the output.
        token_ids: the prompt's first.
        finish: MOVED if the output is not complete.
    """

    tenant: str
    request_id: str
    seed: int
    sampling: SamplingParams
    lora: LoraReference | None
    num_prompt_tokens: int
    token_ids: IntArray
    finish: Finish
    media: tuple[MediaItem, ...] = ()

    @staticmethod
    def of(sequence: Sequence, token_ids: array[int], finish: Finish) -> KnownOutput | None:
        """Return the tokens of a sequence; None if they are not enough to continue its request."""
        params = sequence.sampling
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        if has_logprobs or sequence.beams is not None or sequence.pooling is not None:
            return None
        return KnownOutput(
            sequence.tenant,
            sequence.request_id,
            sequence.seed,
            params,
            sequence.lora,
            sequence.num_prompt_tokens,
            np.array(token_ids, np.int32),  # a view would keep the sequence from adding tokens
            finish,
            sequence.media,
        )

    def answer(self, recall: Recall) -> RecalledOutput | None:
        """Return the generated tokens, if they are of the request."""
        index = self.seed - recall.seed
        if (self.tenant, self.request_id) != (recall.tenant, recall.request_id):
            return None
        if not 0 <= index < recall.num_outputs:
            return None
        prompt, generated = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        if content_digest(prompt, self.sampling, self.lora, self.media) != recall.content:
            return None
        return RecalledOutput(index, generated, self.finish)


_codec = FrameCodec("retained output", 1, {"output": KnownOutput})


class RetainedOutputs:
    """Tokens of the sequences that have ended within RETENTION_S, within a bound of memory.

    Each output is kept as a frame: the garbage collector visits an object of six others at each full collection,
    which took 34 ms for 14,400 outputs, and no bytes.

    A gateway that died took the numbers of its requests with it. Another one finds them by tenant and request_id.
    Beam searches are not kept, nor requests that report log-probabilities, which are not kept either: these are
    computed again.

    Args:
        max_bytes: memory of the tokens; the oldest sequences are dropped for new ones.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        # (expiry, request, frame), the oldest first
        self._kept: deque[tuple[float, str, bytes]] = deque()
        # request |-> the frame of its output, or the frames of its outputs, the oldest first
        self._of_request: dict[str, bytes | tuple[bytes, ...]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: Sequence, token_ids: array[int], finish: Finish, now: float) -> None:
        """Keep a sequence that ends.

        Args:
            token_ids: all of them, the prompt's first.
            finish: MOVED if the output is not complete.
        """
        output = KnownOutput.of(sequence, token_ids, finish)
        if output is None or len(token_ids) <= sequence.num_prompt_tokens:
            return
        frame = _codec.encode(output)
        self.num_bytes += _ENTRY_BYTES + len(frame)
        request = _request_key(output.tenant, output.request_id)
        self._kept.append((now + RETENTION_S, request, frame))
        others = self._of_request.get(request)
        self._of_request[request] = frame if others is None else (*_frames(others), frame)
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()
        self.drop_expired(now)

    def drop_expired(self, now: float) -> None:
        """Forget the sequences that were kept long enough."""
        while self._kept and self._kept[0][0] <= now:
            self._drop_oldest()

    def find(self, recall: Recall) -> list[RecalledOutput]:
        """Return the outputs of a request, as far as they are kept."""
        frames = _frames(self._of_request.get(_request_key(recall.tenant, recall.request_id), ()))
        answers = (_codec.decode(frame).answer(recall) for frame in frames)
        return [answer for answer in answers if answer is not None]

    def _drop_oldest(self) -> None:
        _, request, frame = self._kept.popleft()
        self.num_bytes -= _ENTRY_BYTES + len(frame)
        frames = _frames(self._of_request.pop(request))
        if len(frames) > 1:
            self._of_request[request] = frames[1:]


def _request_key(tenant: str, request_id: str) -> str:
    return f"{tenant}\0{request_id}"


def _frames(one_or_more: bytes | tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (one_or_more,) if isinstance(one_or_more, bytes) else one_or_more
