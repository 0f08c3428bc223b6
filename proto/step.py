"""StepPlan and StepResult: what the scheduler tells every rank each step, and what comes back.

Full once, diffs after. A plan is applied in this order:

1. `released_rows` are emptied;
2. `new` sequences are put into their rows, with tokens and block tables in full;
3. `appended_ids` are appended to the block tables of `appended_rows`; then the tables must have `digest`;
4. blocks move, before anything is computed: all of `swap_out`, then all of `swap_in`, then all of `copies`;
5. the newest tokens of `chosen_rows` become `chosen_ids`, in the place of what the ranks sampled (beam search);
6. rows compute. A row is *decoding* from the moment a chunk has reached its last known token. Each decoding row
   computes its newest token, except `held_rows`; each of `chunk_rows` computes its next `chunk_lens` tokens;
7. rows whose last known token was computed in this step sample one token, which becomes their newest.

Ranks append sampled tokens to their rows by themselves, so a steady decode step carries nothing a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from .block_tables import IntArray
from .errors import ProtocolError

VERSION = 2
NO_INTS: IntArray = np.zeros(0, dtype=np.int32)
NO_INTS.flags.writeable = False
NO_PAIRS: IntArray = NO_INTS.reshape(0, 2)

FloatArray = npt.NDArray[np.float32]
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class RowLogitsProcessors:
    """What changes a row's logits before anything is drawn from them; the fields are as in SamplingParams.

    Attributes:
        num_prompt_tokens: where the sequence's answer begins.
        bad_words: token ids of sequences that may not be completed.
        min_len: while the sequence (prompt included) is shorter than this, `stop_token_ids` cannot be
            sampled: what min_tokens asks for.
        stop_token_ids: tokens that would end the sequence; empty unless min_len needs them.
    """

    num_prompt_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_len: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @staticmethod
    def unpack(value: Any) -> RowLogitsProcessors:
        prompt_len, repetition, frequency, presence, bias, words, allowed, min_len, stops = value
        return RowLogitsProcessors(
            prompt_len,
            repetition,
            frequency,
            presence,
            tuple((token_id, number) for token_id, number in bias),
            tuple(map(tuple, words)),
            None if allowed is None else tuple(allowed),
            min_len,
            tuple(stops),
        )


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Which tokens of its prompt a row reports the log-probabilities of.

    Attributes:
        num_top: likeliest tokens to report beside each, as prompt_logprobs in SamplingParams.
        start, end: places in the prompt, from 1 on, since nothing comes before the first token.
    """

    num_top: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a row samples, in full: a pure function of (logits, this, the sequence so far).

    Attributes:
        seed: 64-bit; with the position it keys the row's random numbers.
        logprobs: as in SamplingParams.
        logits_processors: None for most rows, which sample from the logits unchanged.
        scoring: None where the log-probabilities of the prompt are not asked for, or are known.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logits_processors: RowLogitsProcessors | None = None
    scoring: PromptScoring | None = None

    def pack(self) -> tuple[Any, ...]:
        """As a msgpack value."""
        *settings, processors, scoring = values_of(self)
        parts = (None if part is None else values_of(part) for part in (processors, scoring))
        return *settings, *parts

    @staticmethod
    def unpack(value: Any) -> RowSampling:
        *settings, processors, scoring = value
        return replace(
            RowSampling(*settings),
            logits_processors=None if processors is None else RowLogitsProcessors.unpack(processors),
            scoring=None if scoring is None else PromptScoring(*scoring),
        )


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence in full, put into a row: one that starts, or that comes back after a preemption or a failure.

    Attributes:
        token_ids: prompt and whatever was generated before.
        num_computed_tokens: of token_ids, those whose KV the blocks hold already (a prefix hit).
        block_ids: its block table so far.
    """

    row: int
    seq_id: int
    token_ids: IntArray
    num_computed_tokens: int
    block_ids: IntArray
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of every rank. All arrays are int32; the module's docstring says how they are applied.

    Attributes:
        step_id: counts the steps of an epoch from 1.
        epoch: counts the lives of the worker group; answers of an earlier epoch are refused.
        digest: of the block tables after steps 1 to 3.
        copies: [n, 2] block ids, source and destination; no block is both (copy-on-write).
        swap_out: [n, 2] device block and host block that it is copied to.
        swap_in: [n, 2] host block and device block that it is copied to.
    """

    step_id: int
    epoch: int
    digest: int
    released_rows: IntArray = field(default_factory=lambda: NO_INTS)
    new: tuple[NewSequence, ...] = ()
    appended_rows: IntArray = field(default_factory=lambda: NO_INTS)
    appended_ids: IntArray = field(default_factory=lambda: NO_INTS)
    copies: IntArray = field(default_factory=lambda: NO_PAIRS)
    swap_out: IntArray = field(default_factory=lambda: NO_PAIRS)
    swap_in: IntArray = field(default_factory=lambda: NO_PAIRS)
    chosen_rows: IntArray = field(default_factory=lambda: NO_INTS)
    chosen_ids: IntArray = field(default_factory=lambda: NO_INTS)
    held_rows: IntArray = field(default_factory=lambda: NO_INTS)
    chunk_rows: IntArray = field(default_factory=lambda: NO_INTS)
    chunk_lens: IntArray = field(default_factory=lambda: NO_INTS)

    def encode(self) -> bytes:
        return _pack(
            (
                self.step_id,
                self.epoch,
                self.digest,
                pack_ints(self.released_rows),
                [_encode_new(sequence) for sequence in self.new],
                pack_ints(self.appended_rows),
                pack_ints(self.appended_ids),
                pack_ints(self.copies),
                pack_ints(self.swap_out),
                pack_ints(self.swap_in),
                pack_ints(self.chosen_rows),
                pack_ints(self.chosen_ids),
                pack_ints(self.held_rows),
                pack_ints(self.chunk_rows),
                pack_ints(self.chunk_lens),
            )
        )

    @staticmethod
    def decode(frame: bytes) -> StepPlan:
        """Raises ProtocolError on an unknown version or shape."""
        return _unpack(frame, _decode_plan)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of those sampled tokens whose rows asked for them.

    Attributes:
        index: [n] int32, positions in the token array that this goes with.
        chosen: [n] float32, of the sampled tokens.
        top_ids: [n, k] int32, likeliest tokens first; k is the most that any row asked for.
        top: [n, k] float32.
    """

    index: IntArray
    chosen: FloatArray
    top_ids: IntArray
    top: FloatArray

    def select(self, positions: IntArray) -> Logprobs | None:
        """The entries for `positions` (ascending, of the token array), renumbered to count within them."""
        keep = np.isin(self.index, positions)
        if not keep.any():
            return None
        index = np.searchsorted(positions, self.index[keep]).astype(np.int32)
        return Logprobs(index, self.chosen[keep], self.top_ids[keep], self.top[keep])

    def pack(self) -> tuple[Any, ...]:
        """As a msgpack value."""
        floats = self.chosen.astype("<f4").tobytes(), self.top.astype("<f4").tobytes()
        return pack_ints(self.index), floats[0], self.top_ids.shape[1], pack_ints(self.top_ids), floats[1]

    @staticmethod
    def unpack(value: Any) -> Logprobs:
        index, chosen, width, top_ids, top = value
        return Logprobs(
            ints(index),
            np.frombuffer(chosen, dtype="<f4"),
            ints(top_ids).reshape(-1, width) if width else np.zeros((len(chosen) // 4, 0), np.int32),
            np.frombuffer(top, dtype="<f4").reshape(-1, width)
            if width
            else np.zeros((len(chosen) // 4, 0), "<f4"),
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of tokens of prompts.

    Attributes:
        owners: [n] int32, whose each is: its row in a StepResult, its handle in a TokenBatch. Those of an owner are
            together, in the order of its prompt.
        logprobs: of all; its `index` is the token's place in its prompt, from 1 on.
    """

    owners: IntArray
    logprobs: Logprobs

    def select(self, mask: npt.NDArray[np.bool_], owners: IntArray) -> PromptLogprobs | None:
        """The entries under a mask, which then belong to `owners`; None where there are none."""
        all_ = self.logprobs
        if not mask.any():
            return None
        kept = Logprobs(all_.index[mask], all_.chosen[mask], all_.top_ids[mask], all_.top[mask])
        return PromptLogprobs(owners, kept)

    def pack(self) -> tuple[Any, ...]:
        """As a msgpack value."""
        return pack_ints(self.owners), self.logprobs.pack()

    @staticmethod
    def unpack(value: Any) -> PromptLogprobs:
        owners, logprobs = value
        return PromptLogprobs(ints(owners), Logprobs.unpack(logprobs))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a rank answers. Rank 0's carries the tokens; the others', which sampled the same, only that they did.

    Attributes:
        token_ids: [rows that sampled] int32, by ascending row; empty from other ranks than 0.
        prompt_logprobs: of the prompt tokens that were scored in the step.
        stage_times: seconds by stage (``apply``, ``forward``, ``sample``); and ``wait``, from the answer before until
            this step's plan was there.
    """

    step_id: int
    epoch: int
    rank: int
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    logprobs: Logprobs | None = None
    stage_times: dict[str, float] = field(default_factory=dict)
    prompt_logprobs: PromptLogprobs | None = None

    def encode(self) -> bytes:
        logprobs = None if self.logprobs is None else self.logprobs.pack()
        of_prompts = None if self.prompt_logprobs is None else self.prompt_logprobs.pack()
        step = self.step_id, self.epoch, self.rank
        return _pack(("ok", *step, pack_ints(self.token_ids), logprobs, self.stage_times, of_prompts))


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A rank's own word that it cannot do a step.

    Attributes:
        step_id: 0 outside a step.
        stage: where it happened: ``apply``, ``forward``, ``sample``, ...
        reason: one line.
    """

    step_id: int
    epoch: int
    rank: int
    stage: str
    reason: str

    def encode(self) -> bytes:
        return _pack(("failed", self.step_id, self.epoch, self.rank, self.stage, self.reason))


def decode_reply(frame: bytes) -> StepResult | StepFailure:
    """Raises ProtocolError on an unknown version or shape."""
    return _unpack(frame, _decode_reply)


def ints(raw: bytes) -> IntArray:
    """A read-only [n] int32 view of little-endian bytes."""
    return np.frombuffer(raw, dtype="<i4")


def pack_ints(values: IntArray) -> bytes:
    """The array as little-endian int32 bytes; `ints` reads them."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def values_of(instance: Any) -> tuple[Any, ...]:
    """A dataclass's fields, in order. Unlike `astuple` it copies nothing: some have tens of thousands of ids."""
    return tuple(getattr(instance, member.name) for member in fields(instance))


def _pack(values: tuple[Any, ...]) -> bytes:
    packed: bytes = msgpack.packb(values)
    return bytes((VERSION,)) + packed


def _unpack(frame: bytes, decode: Callable[[Any], Message]) -> Message:
    if not frame or frame[0] != VERSION:
        raise ProtocolError(
            f"step message of version {frame[0] if frame else 'none'}; this side speaks {VERSION}"
        )
    try:
        return decode(msgpack.unpackb(memoryview(frame)[1:]))
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ProtocolError(f"step message cannot be read: {error}") from error


def _encode_new(sequence: NewSequence) -> tuple[Any, ...]:
    return (
        sequence.row,
        sequence.seq_id,
        pack_ints(sequence.token_ids),
        sequence.num_computed_tokens,
        pack_ints(sequence.block_ids),
        sequence.sampling.pack(),
    )


def _decode_new(value: Any) -> NewSequence:
    row, seq_id, token_ids, num_computed_tokens, block_ids, sampling = value
    settings = RowSampling.unpack(sampling)
    return NewSequence(row, seq_id, ints(token_ids), num_computed_tokens, ints(block_ids), settings)


def _decode_plan(fields: Any) -> StepPlan:
    step_id, epoch, digest, released, new, *arrays = fields
    rows, ids, copies, swap_out, swap_in, chosen_rows, chosen_ids, held, chunk_rows, chunk_lens = map(
        ints, arrays
    )
    return StepPlan(
        step_id=step_id,
        epoch=epoch,
        digest=digest,
        released_rows=ints(released),
        new=tuple(_decode_new(value) for value in new),
        appended_rows=rows,
        appended_ids=ids,
        copies=copies.reshape(-1, 2),
        swap_out=swap_out.reshape(-1, 2),
        swap_in=swap_in.reshape(-1, 2),
        chosen_rows=chosen_rows,
        chosen_ids=chosen_ids,
        held_rows=held,
        chunk_rows=chunk_rows,
        chunk_lens=chunk_lens,
    )


def _decode_reply(fields: Any) -> StepResult | StepFailure:
    kind, *rest = fields
    if kind == "failed":
        return StepFailure(*rest)
    if kind != "ok":
        raise ValueError(f"unknown kind {kind!r}")
    step_id, epoch, rank, token_ids, logprobs, stage_times, of_prompts = rest
    unpacked = None if logprobs is None else Logprobs.unpack(logprobs)
    scored = None if of_prompts is None else PromptLogprobs.unpack(of_prompts)
    return StepResult(step_id, epoch, rank, ints(token_ids), unpacked, stage_times, scored)
