"""BeamSearch: the algorithm, over log-probabilities; no rows, no blocks.

It makes the same decisions as transformers' beam search (which continuations are kept, the score of a complete one,
when to end), so that equal logits give equal outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...proto.block_tables import IntArray
from ...proto.codec import FloatArray


class Continuation(NamedTuple):
    """A beam of the next step: the number of the present beam that it continues, and the token it appends."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A complete continuation.

    Attributes:
        token_ids: generated tokens, including the last.
        score: summed log-probability divided by length to the power of the length penalty.
        at_eos: a stop token ended it, not its length.
    """

    token_ids: tuple[int, ...]
    score: float
    at_eos: bool


class BeamSearch:
    """The beams of one request.

    Args:
        width: number of beams.
        max_new_tokens: most tokens of a hypothesis.
        min_new_tokens: number of first tokens that cannot be stop tokens.
        stop_token_ids: tokens that complete a hypothesis.
        length_penalty, early_stopping: as in SamplingParams.

    Attributes:
        hypotheses: best complete continuations so far, best first, at most `width`.
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
        self.hypotheses: list[BeamHypothesis] = []
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = min_new_tokens
        self._stops = frozenset(stop_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._scores = np.zeros(1, np.float32)  # of the present beams, best first; one before the first step
        self._histories: list[tuple[int, ...]] = [()]

    @property
    def num_candidates(self) -> int:
        """Return the number of continuations compared per step, over all beams: `width` remain if others complete."""
        num_excluded = len(self._stops) if self._min_new_tokens else 0
        return max(2, 1 + len(self._stops)) * self.width + num_excluded

    def advance(self, candidates: list[tuple[IntArray, FloatArray]]) -> list[Continuation]:
        """Advance all beams by one token.

        Args:
            candidates: for each present beam its `num_candidates` most likely tokens and their log-probabilities.

        Returns:
            The beams of the next step, best first; empty at the end of the search.
        """
        length = len(self._histories[0]) + 1
        best = self._best_continuations(candidates)
        if length <= self._min_new_tokens:
            # A constraint may leave nothing but the end.
            best = [entry for entry in best if entry[1] not in self._stops] or best
        completes = [token in self._stops or length >= self._max_new_tokens for _, token, _ in best]
        self._add_hypotheses(best[: self.width], completes, length)
        running = [entry for entry, complete in zip(best, completes, strict=True) if not complete][
            : self.width
        ]
        self._histories = [(*self._histories[parent], token) for parent, token, _ in running]
        self._scores = np.array([score for _, _, score in running], np.float32)
        if not running or self._is_over(length):
            return []
        return [Continuation(parent, token) for parent, token, _ in running]

    def _best_continuations(
        self, candidates: list[tuple[IntArray, FloatArray]]
    ) -> list[tuple[int, int, np.float32]]:
        """Return (beam, token, summed log-probability) of the best continuations over all beams, best first.

        Tokens that a constraint does not allow have a probability of 0, and are left out.
        """
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
        order = order[np.isfinite(scores[order])]
        return [(int(beams[i]), int(tokens[i]), np.float32(scores[i])) for i in order]

    def _add_hypotheses(
        self, best: list[tuple[int, int, np.float32]], completes: list[bool], length: int
    ) -> None:
        if self._early_stopping and len(self.hypotheses) == self.width:
            return
        for (parent, token, score), complete in zip(best, completes, strict=False):
            if complete:
                final_score = float(score / np.float32(length**self._length_penalty))
                history = (*self._histories[parent], token)
                self.hypotheses.append(BeamHypothesis(history, final_score, token in self._stops))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _is_over(self, length: int) -> bool:
        """Return whether no open beam, by its present score, is better than the worst hypothesis."""
        if len(self.hypotheses) < self.width:
            return False
        if self._early_stopping:
            return True
        best_open = float(self._scores[0] / np.float32(length**self._length_penalty))
        return best_open <= self.hypotheses[-1].score
