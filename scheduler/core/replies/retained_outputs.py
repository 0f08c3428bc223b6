"""RetainedOutputs: tokens of sequences that have ended, for gateways that continue another gateway's requests."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

import numpy as np

from ....proto.digests import content_digest
from ....proto.lora import LoraReference
from ....proto.sampling import SamplingParams
from ....proto.stream import Finish, Recall, RecalledOutput
from ...sequences.sequence import Sequence

# A client connects to another gateway within seconds; a proxy in between may take longer.
RETENTION_S = 60.0
# 16 million tokens, prompts included.
MAX_BYTES = 64 << 20
# Estimate of an output's memory beside its tokens, measured with sys.getsizeof.
_ENTRY_BYTES = 1000


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
    token_ids: array[int]
    finish: Finish

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
            token_ids,
            finish,
        )

    def answer(self, recall: Recall) -> RecalledOutput | None:
        """Return the generated tokens, if they are of the request."""
        index = self.seed - recall.seed
        if (self.tenant, self.request_id) != (recall.tenant, recall.request_id):
            return None
        if not 0 <= index < recall.num_outputs:
            return None
        token_ids = np.array(self.token_ids, np.int32)
        prompt, generated = token_ids[: self.num_prompt_tokens], token_ids[self.num_prompt_tokens :]
        if content_digest(prompt, self.sampling, self.lora) != recall.content:
            return None
        return RecalledOutput(index, generated, self.finish)


class RetainedOutputs:
    """Tokens of the latest sequences that have ended, within bounds of time and memory.

    A gateway that died took the numbers of its requests with it. Another one finds them by tenant and request_id.
    Beam searches are not kept, nor requests that report log-probabilities, which are not kept either: these are
    computed again.

    Args:
        max_bytes: memory of the tokens; the oldest sequences are dropped for new ones.
        retention_s: how long a sequence is kept.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, retention_s: float = RETENTION_S) -> None:
        self._max_bytes = max_bytes
        self._retention_s = retention_s
        # (expiry, output), the oldest first
        self._kept: deque[tuple[float, KnownOutput]] = deque()
        # (tenant, request_id) |-> its output, or its outputs, the oldest first
        self._of_request: dict[tuple[str, str], KnownOutput | list[KnownOutput]] = {}
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
        self.num_bytes += _num_bytes(output)
        self._kept.append((now + self._retention_s, output))
        key = output.tenant, output.request_id
        others = self._of_request.setdefault(key, output)
        if isinstance(others, list):
            others.append(output)
        elif others is not output:
            self._of_request[key] = [others, output]
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()
        self.drop_expired(now)

    def drop_expired(self, now: float) -> None:
        """Forget the sequences that were kept long enough."""
        while self._kept and self._kept[0][0] <= now:
            self._drop_oldest()

    def find(self, recall: Recall) -> list[RecalledOutput]:
        """Return the outputs of a request, as far as they are kept."""
        outputs = self._of_request.get((recall.tenant, recall.request_id), [])
        if isinstance(outputs, KnownOutput):
            outputs = [outputs]
        answers = (output.answer(recall) for output in outputs)
        return [answer for answer in answers if answer is not None]

    def _drop_oldest(self) -> None:
        _, output = self._kept.popleft()
        self.num_bytes -= _num_bytes(output)
        key = output.tenant, output.request_id
        outputs = self._of_request[key]
        if isinstance(outputs, list) and len(outputs) > 1:
            del outputs[0]
        else:
            del self._of_request[key]


def _num_bytes(output: KnownOutput) -> int:
    return _ENTRY_BYTES + len(output.token_ids) * output.token_ids.itemsize
