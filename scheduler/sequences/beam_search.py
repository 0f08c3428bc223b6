"""BeamSearch: which continuations live on. The algorithm alone, over log-probabilities; no rows, no blocks.

It follows transformers' beam search decision for decision (which continuations are kept, what a complete one is
worth, when to end), so that equal logits give equal answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.codec import FloatArray


class Child(NamedTuple):
    """A running beam of the next step: which present beam it continues, and with what."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A complete continuation.

    Attributes:
        token_ids: generated tokens, the one that completed it included.
        score: summed log-probability over length to the power of the length penalty.
        at_eos: it ended by itself, not by length.
    """

    token_ids: tuple[int, ...]
    score: float
    at_eos: bool


class BeamSearch:
    """The beams of one request.

    Args:
        width: beams that run at once.
        max_new_tokens: most tokens of an answer.
        min_new_tokens: an answer cannot be complete by a stop token before it has this many tokens.
        stop_token_ids: tokens that complete an answer.
        length_penalty, early_stopping: as in SamplingParams.

    Attributes:
        answers: the best complete ones so far, best first, at most `width`.
    """

    def __init__(
        self,
        width: int,
        max_new_tokens: int,
        min_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        length_penalty: float,
        early_stopping: bool,
    ) -> None:
        self.width = width
        self.answers: list[BeamHypothesis] = []
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._stops = frozenset(stop_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._scores = np.zeros(1, np.float32)  # of the running beams, best first; one before the first step
        self._histories: list[tuple[int, ...]] = [()]

    @property
    def num_candidates(self) -> int:
        """Continuations looked at each step, over all beams: enough that `width` remain when others complete."""
        barred = len(self._stops) if self._min_new_tokens else 0
        return max(2, 1 + len(self._stops)) * self.width + barred

    def advance(self, candidates: list[tuple[IntArray, FloatArray]]) -> list[Child]:
        """One step of all beams.

        Args:
            candidates: for each running beam its `num_candidates` likeliest tokens and their log-probabilities.

        Returns:
            The running beams of the next step, best first; empty when the search is over.
        """
        length = len(self._histories[0]) + 1
        best = self._best_continuations(candidates)
        if length <= self._min_new_tokens:
            best = [entry for entry in best if entry[1] not in self._stops]
        completes = [token in self._stops or length >= self._max_new_tokens for _, token, _ in best]
        self._take_answers(best[: self.width], completes, length)
        running = [entry for entry, complete in zip(best, completes, strict=True) if not complete][
            : self.width
        ]
        self._histories = [(*self._histories[parent], token) for parent, token, _ in running]
        self._scores = np.array([score for _, _, score in running], np.float32)
        if not running or self._is_over(length):
            return []
        return [Child(parent, token) for parent, token, _ in running]

    def _best_continuations(
        self, candidates: list[tuple[IntArray, FloatArray]]
    ) -> list[tuple[int, int, np.float32]]:
        """(beam, token, summed log-probability) of the best over all beams, best first."""
        counts = [len(token_ids) for token_ids, _ in candidates]
        beams = np.repeat(np.arange(len(candidates)), counts)
        tokens = np.concatenate([token_ids for token_ids, _ in candidates])
        scores = np.concatenate(
            [
                logprobs.astype(np.float32) + self._scores[beam]
                for beam, (_, logprobs) in enumerate(candidates)
            ]
        )
        order = np.argsort(-scores, kind="stable")[: self.num_candidates]
        return [(int(beams[i]), int(tokens[i]), np.float32(scores[i])) for i in order]

    def _take_answers(
        self, best: list[tuple[int, int, np.float32]], completes: list[bool], length: int
    ) -> None:
        if self._early_stopping and len(self.answers) == self.width:
            return
        for (parent, token, score), complete in zip(best, completes, strict=False):
            if complete:
                worth = float(score / np.float32(length**self._length_penalty))
                history = (*self._histories[parent], token)
                self.answers.append(BeamHypothesis(history, worth, token in self._stops))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self.width :]

    def _is_over(self, length: int) -> bool:
        """No open beam can still do better than the worst complete answer, by its present worth."""
        if len(self.answers) < self.width:
            return False
        if self._early_stopping:
            return True
        best_open = float(self._scores[0] / np.float32(length**self._length_penalty))
        return best_open <= self.answers[-1].score
