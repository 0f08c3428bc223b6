"""RepetitionDetector: finds the end of an output that repeats itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...proto.structured_outputs import RepetitionDetectionParams


class RepetitionDetector:
    """Detects a pattern that occurs several times in succession at the end of the tokens pushed so far.

    A pattern of p tokens has occurred c times if the last p * (c - 1) tokens equal the tokens p places before them.
    The state is the number of such tokens for each p, so a token costs one comparison per p.

    Attributes:
        has_found: a repetition has ended the output; later tokens are ignored.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._sizes = np.arange(params.min_pattern_size, params.max_pattern_size + 1)
        self._needed = self._sizes * (params.min_count - 1)
        self._num_equal = np.zeros(self._sizes.size, np.int64)
        # Twice the longest pattern; the newest tokens are at the end.
        self._tokens = np.full(2 * params.max_pattern_size, -1, np.int64)
        self._num_tokens = 0
        self.has_found = False

    def push(self, token_ids: Iterable[int]) -> int | None:
        """Add tokens; return the number of them up to the end of the first repetition, or None if there is none."""
        for count, token_id in enumerate(token_ids, 1):
            if not self.has_found and self._push(token_id):
                self.has_found = True
                return count
        return None

    def _push(self, token_id: int) -> bool:
        if self._num_tokens == self._tokens.size:
            half = self._tokens.size // 2
            self._tokens[:half] = self._tokens[half:]
            self._num_tokens = half
        places = self._num_tokens - self._sizes
        is_equal = (self._tokens[places] == token_id) & (places >= 0)
        self._num_equal = np.where(is_equal, self._num_equal + 1, 0)
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1
        return bool((self._num_equal >= self._needed).any())
