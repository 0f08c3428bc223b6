"""Shapes of the steps that are recorded as graphs, and the choice of one for a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Decoding rows and chunk tokens of graphs for steps with chunks, which have up to NUM_CHUNKS chunks.
MIXED_DECODES = (16, 64, 256)
MIXED_CHUNK_TOKENS = (64, 128, 256)
NUM_CHUNKS = 8
# Up to about as many tokens an H100 multiplies 16-bit numbers while it reads the weights: padding costs nothing.
FREE_TOKENS = 256
# Of a larger step, tokens with padding per token. Beyond, launching the kernels one by one is faster.
MAX_PADDING_RATIO = 4 / 3
# Of attention that gathers the keys of whole sequences: most tokens of a sequence in a graph, and of all its rows, of
# which a layer of DeepSeek-V4 gathers 0.3 GB.
GATHERED_LENS = (1024, 4096, 16384)
MAX_GATHERED_TOKENS = 1 << 19


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Largest numbers of rows and tokens of a recorded step, whose smaller steps are padded.

    Attributes:
        num_decodes: rows with one token.
        num_chunks, num_chunk_tokens: chunks of prompts, and their tokens together; 0 for steps of decodes only.
        has_adapters: rows may have LoRA adapters.
        max_len: tokens of the longest sequence; 0 for any.
    """

    num_decodes: int
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    has_adapters: bool = False
    max_len: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunk_tokens

    def holds(self, num_decodes: int, num_chunks: int, num_chunk_tokens: int, max_len: int) -> bool:
        """Return whether a step fits in."""
        return (
            num_decodes <= self.num_decodes
            and num_chunks <= self.num_chunks
            and num_chunk_tokens <= self.num_chunk_tokens
            and max_len <= (self.max_len or max_len)
        )


def decode_shapes(max_num_seqs: int, max_num_tokens: int) -> list[GraphShape]:
    """Return the shapes of steps of decodes, the smallest first; padding is at most a third of more than 8 rows.

    Args:
        max_num_tokens: of the rows together, with drafted ones.
    """
    powers = [1 << exponent for exponent in range(max_num_tokens.bit_length())]
    midpoints = [power + power // 2 for power in powers if power >= 16]
    sizes = {size for size in (*powers, *midpoints) if size < max_num_tokens} | {max_num_seqs, max_num_tokens}
    return [GraphShape(size) for size in sorted(sizes)]


def adapted_shapes(max_num_seqs: int, max_num_tokens: int, num_lora_slots: int) -> list[GraphShape]:
    """Return the shapes of steps of decodes with adapters, as `decode_shapes`; none without slots.

    They are others than those of steps without: an empty launch for each linear layer would delay these.
    """
    shapes = decode_shapes(max_num_seqs, max_num_tokens) if num_lora_slots else []
    return [replace(shape, has_adapters=True) for shape in shapes]


def bounded_shapes(shapes: list[GraphShape], max_seq_len: int) -> list[GraphShape]:
    """Return shapes for attention that gathers the keys of whole sequences, each with several bounds of lengths.

    A recording gathers as many keys for each sequence as the longest one may have.
    """
    lens = sorted({min(length, max_seq_len) for length in GATHERED_LENS})
    return [
        replace(shape, max_len=length)
        for shape in shapes
        for length in lens
        if shape.num_rows * length <= MAX_GATHERED_TOKENS
    ]


def mixed_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[GraphShape]:
    """Return the shapes of steps with chunks, those of the fewest tokens first."""
    decodes = {min(size, max_num_seqs) for size in MIXED_DECODES}
    chunk_tokens = {min(size, max_num_batched_tokens) for size in MIXED_CHUNK_TOKENS}
    shapes = [GraphShape(rows, NUM_CHUNKS, tokens) for rows in decodes for tokens in chunk_tokens]
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_decodes))


def find_shape(
    shapes: list[GraphShape], num_decodes: int, num_chunks: int, num_chunk_tokens: int, max_len: int = 0
) -> GraphShape | None:
    """Return the smallest shape for a step. Returns None if there is none, or if it has too much padding.

    Args:
        shapes: the smallest first.
        max_len: tokens of the longest sequence.
    """
    step = num_decodes, num_chunks, num_chunk_tokens, max_len
    shape = next((shape for shape in shapes if shape.holds(*step)), None)
    if shape is None or num_chunks == 0:
        return shape
    most = max(FREE_TOKENS, MAX_PADDING_RATIO * (num_decodes + num_chunk_tokens))
    return shape if shape.num_tokens <= most else None
