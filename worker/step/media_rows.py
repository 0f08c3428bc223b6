"""MediaRows: the images of a rank's rows, and what a step's tokens need of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...proto.block_tables import IntArray, RowArray
from ...proto.step import NewSequence
from ...proto.vision import LongArray, VisionSpec, rotary_positions, runs
from ..attention import NO_SPANS, ImageSpan, ImageSpans


@dataclass(frozen=True, slots=True)
class _RowImages:
    """The images of one row's prompt.

    Attributes:
        places: of each image, the positions of its image tokens, ascending.
        media_ids: of each image's encoder output.
        positions: [3, P], the rotary positions of the prompt; None if they are its tokens' places.
    """

    places: tuple[LongArray, ...]
    media_ids: tuple[int, ...]
    positions: IntArray | None


class Piece(NamedTuple):
    """Rows of an encoder output that stand at successive image tokens."""

    media_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepMedia:
    """The image tokens of a step.

    Attributes:
        index: [N] int64, these tokens among the T.
        pieces: the encoder outputs of these tokens, N rows in all.
    """

    index: LongArray
    pieces: tuple[Piece, ...]


class MediaRows:
    """Images of rows; most rows have none.

    Args:
        sees_whole_prompt: as in ModelConfig.

    Attributes:
        shifts: [R] int32, the difference of a generated token's rotary position and its place in the sequence.
    """

    def __init__(self, vision: VisionSpec | None, num_rows: int, *, sees_whole_prompt: bool = False) -> None:
        self._vision, self._sees_whole_prompt = vision, sees_whole_prompt
        self._rows: dict[int, _RowImages] = {}
        self.shifts: IntArray = np.zeros(num_rows, np.int32)

    def put(self, sequence: NewSequence) -> None:
        """Take the images of a sequence that enters a row."""
        if not sequence.media:
            return
        if sequence.num_source_tokens:  # it has the prompt of the row from which it is forked
            assert sequence.source_row is not None
            self._rows[sequence.row] = self._rows[sequence.source_row]
            self.shifts[sequence.row] = self.shifts[sequence.source_row]
            return
        vision = self._vision
        assert vision is not None, "a plan has images for a model that reads none"
        places = tuple(
            vision.places(sequence.token_ids[item.start : item.end]) + item.start for item in sequence.media
        )
        positions = None
        if vision.has_grid_positions:
            num_prompt_tokens = len(sequence.token_ids) - sequence.num_generated
            positions, shift = rotary_positions(num_prompt_tokens, sequence.media, places, vision.merge_size)
            self.shifts[sequence.row] = shift
        self._rows[sequence.row] = _RowImages(places, tuple(sequence.media_ids.tolist()), positions)

    def release(self, rows: IntArray | RowArray) -> None:
        """Forget the images of rows."""
        if not self._rows:
            return
        for row in rows.tolist():
            self._rows.pop(row, None)
        self.shifts[rows] = 0

    def has_any(self, rows: LongArray) -> bool:
        """Return whether some of the rows have images, or prompts that attend to all of their tokens."""
        if self._sees_whole_prompt:
            return True
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def rotary_positions(
        self, token_rows: LongArray, places: LongArray, chunks: list[tuple[int, int, int, int]]
    ) -> LongArray:
        """Return the rotary positions of a step's tokens: [T], or [3, T] if some are within a prompt with images.

        Args:
            token_rows, places: [T], the row of each token and its place in the sequence.
            chunks: row, first place, number of tokens and index of the first token in the step, of each chunk.
        """
        positions = places + self.shifts[token_rows]
        found = [(chunk, self._rows[chunk[0]].positions) for chunk in chunks if chunk[0] in self._rows]
        in_prompts = [
            (chunk, known) for chunk, known in found if known is not None and chunk[1] < known.shape[1]
        ]
        if not in_prompts:
            return positions
        positions = np.tile(positions, (3, 1))
        for (_, start, length, source), known in in_prompts:
            own = known[:, start : start + length]
            positions[:, source : source + own.shape[1]] = own
        return positions

    def image_tokens(self, chunks: list[tuple[int, int, int, int]]) -> StepMedia | None:
        """Return the image tokens of a step's chunks; None if there are none."""
        index: list[LongArray] = []
        pieces: list[Piece] = []
        for row, start, length, source in chunks:
            images = self._rows.get(row)
            if images is None:
                continue
            for places, media_id in zip(images.places, images.media_ids, strict=True):
                first, end = np.searchsorted(places, (start, start + length)).tolist()
                if first < end:
                    index.append(places[first:end] + (source - start))
                    pieces.append(Piece(media_id, first, end))
        return StepMedia(np.concatenate(index), tuple(pieces)) if pieces else None

    def spans(
        self, chunks: list[tuple[int, int, int, int]], num_decodes: int, prompt_lens: IntArray
    ) -> ImageSpans:
        """Return the images, or the whole prompts, of a step's chunks whose tokens attend to each other.

        Args:
            num_decodes: sequences of the step before those of the chunks.
            prompt_lens: [R], of the rows' prompts.
        """
        if self._sees_whole_prompt:
            return ImageSpans(tuple(_prompt_spans(chunks, num_decodes, prompt_lens)), ignores_windows=True)
        if self._vision is None or self._vision.attends_within == "none":
            return NO_SPANS
        found = []
        for index, (row, start, length, source) in enumerate(chunks, num_decodes):
            for places in () if row not in self._rows else self._rows[row].places:
                for run in runs(places):  # crops are apart
                    first, end = max(start, int(run[0])), min(start + length, int(run[-1]) + 1)
                    if first < end:
                        tokens = slice(source + first - start, source + end - start)
                        found.append(ImageSpan(index, tokens, first, int(run[-1]) + 1))
        return ImageSpans(tuple(found), self._vision.attends_within == "windows")


def _prompt_spans(
    chunks: list[tuple[int, int, int, int]], num_decodes: int, prompt_lens: IntArray
) -> Iterator[ImageSpan]:
    """Yield the tokens of prompts in a step's chunks; the arguments are those of MediaRows.spans."""
    for index, (row, start, length, source) in enumerate(chunks, num_decodes):
        end = int(prompt_lens[row])
        if start < end:
            yield ImageSpan(index, slice(source, source + min(length, end - start)), start, end)
