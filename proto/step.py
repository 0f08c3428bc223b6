"""StepPlan and StepResult: the scheduler's message to every rank per step, and each rank's reply.

A sequence is sent in full once, then as diffs. A *row* is a batch slot. A rank applies a plan in this order:

0. adapters: drop `lora_drops` from host memory, begin `lora_loads`, copy those of `lora_slots` into their slots;
1. empty `released_rows`;
2. put the `new` sequences into their rows, in order, with tokens, block tables and state slots in full; a fork takes
   its first tokens and the state of its constraint from its `source_row`;
3. shorten the block tables of `trimmed_rows` to `trimmed_lens`, then append `appended_ids` to those of
   `appended_rows`; the tables, with the encoder outputs, must then have `digest`;
   Then drop the encoder outputs of `media_drops`, and compute those of `encodes`, or a part of them;
4. move blocks, before anything is computed: all of `swap_out`, then all of `swap_in`, then all of `copies`; then
   move states, all of `state_swap_out`, `state_swap_in` and `state_copies` in this order; then begin `stored_orders`;
5. replace the newest tokens of `selected_rows`, which the ranks sampled, by `selected_ids` (beam search);
6. compute. A row is *decoding* from the step on in which a chunk reached its last known token. Each decoding row
   computes its newest token, except `held_rows`; each of `chunk_rows` computes its next `chunk_lens` tokens. After
   its newest token, each of `draft_rows` computes up to `draft_lens` drafted ones, which the ranks propose alike;
7. sample one token for each row whose last known token was computed in this step; it becomes the row's newest. A row
   with drafted tokens samples after each of them, and keeps its samples up to the first that differs from the draft.
   A row with `pooling` samples no token: the result has its pooled vector instead;
8. save states: all of `state_saves`.

A row of a model whose layers keep a state (see proto.model.state) has a state slot, and overwrites it with the state
after its tokens of the step. A row whose first token is in the step begins with an empty state, whatever is there.

Each rank appends the sampled tokens to its own rows, so the plan of a steady decode step carries no per-row data.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .block_tables import IntArray, RowArray
from .codec import (
    NO_INTS,
    NO_PAIRS,
    FloatArray,
    FrameCodec,
    PairArray,
    unpack_floats,
    unpack_ints,
)
from .engine_command import EngineCommand
from .errors import ProtocolError
from .kv_transfer import KvOrders, KvReport
from .later_fields import sent_if_set
from .lora import NO_SLOT, LoraLoad, LoraReport
from .media import MediaItem, MediaTensors, TensorLayout
from .pooling import Pooled, PoolingParams
from .stored_kv import StoredOrder, StoredReport
from .structured_outputs import OutputConstraint

VERSION = 5
# Of an EncoderInput's frame, in which it tells it from a plan.
MEDIA_VERSION = 128
# StepPlan.encode_shares of an image whose encoder output is there after the step.
WHOLE_IMAGE = 10_000


@dataclass(frozen=True, slots=True)
class RowLogitsProcessors:
    """Changes to a row's logits before sampling; fields not listed here are as in SamplingParams.

    Attributes:
        num_prompt_tokens: tokens of the prompt; the output tokens follow them.
        bad_words: token id sequences that must not be completed.
        min_len: while the sequence (prompt included) is shorter than this, `stop_token_ids` cannot be
            sampled. Implements min_tokens.
        stop_token_ids: tokens that would end the sequence; empty unless min_len needs them.
        extra_args: names of custom processors with their arguments as JSON.
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
    extra_args: tuple[tuple[str, str], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def needs_tokens(self) -> bool:
        """Return whether the known tokens of a row matter, not only those that it samples from now on."""
        return self.has_penalties or bool(self.extra_args)


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Range of a row's prompt tokens whose log-probabilities are reported.

    Attributes:
        num_top: most likely tokens to report beside each prompt token, as prompt_logprobs in SamplingParams.
        start, end: positions in the prompt, end excluded; start is at least 1, as nothing predicts the first token.
    """

    num_top: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RowSampling:
    """All settings of a row's sampling, which is a pure function of (logits, settings, the sequence so far).

    Attributes:
        seed: 64-bit; seed and position key the row's random numbers.
        logprobs: the same as in SamplingParams.
        logits_processors: None for most rows, which sample from the logits unchanged.
        scoring: None if the prompt's log-probabilities are not requested or are already reported.
        constraint: None if the output may have any form.
        reports_allowed: of the most likely tokens, report those that the constraint allows. Their log-probabilities
            are the model's own all the same.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logits_processors: RowLogitsProcessors | None = None
    scoring: PromptScoring | None = None
    constraint: OutputConstraint | None = None
    reports_allowed: bool = False


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence in full, put into a row: a new one, or one that resumes after a preemption or a failure.

    Attributes:
        token_ids: the prompt, then every token generated before; of a fork those after `num_source_tokens`.
        num_computed_tokens: leading tokens whose KV the blocks already hold (a prefix cache hit).
        block_ids: its block tables so far: equally many blocks of each cache group, one group after the other. Those
            behind a group's window are 0.
        lora_slot: the slot of its adapter; NO_SLOT for none.
        pooling: the sequence is pooled, and ends with its prompt; None if it generates tokens.
        source_row: row of the sequence from which it is forked. The tokens of that row begin with all but the last of
            this sequence, and the plan does not release it. None for other sequences.
        num_generated: the last tokens, which were generated.
        state_slot: of its state; 0 if the model keeps none.
        num_source_tokens: leading tokens that are copied from `source_row`, no more than the prompt has if there is
            a constraint; 0 if a logits processor needs them all.
        takes_constraint: it has the constraint of `source_row`; `sampling` has none.
        media: the images of its prompt.
        media_ids: of the encoder's output of each of them; see StepPlan.encodes.
    """

    row: int
    seq_id: int
    token_ids: IntArray
    num_computed_tokens: int
    block_ids: IntArray
    sampling: RowSampling
    lora_slot: int = sent_if_set(NO_SLOT)
    pooling: PoolingParams | None = sent_if_set(None)
    source_row: int | None = sent_if_set(None)
    num_generated: int = sent_if_set(0)
    state_slot: int = sent_if_set(0)
    num_source_tokens: int = sent_if_set(0)
    takes_constraint: bool = sent_if_set(False)
    media: tuple[MediaItem, ...] = sent_if_set(())
    media_ids: IntArray = sent_if_set(NO_INTS)

    @property
    def num_tokens(self) -> int:
        """Return the number of its known tokens."""
        return self.num_source_tokens + self.token_ids.size


@dataclass(frozen=True)
class EncoderInput:
    """The tensors of an image, which every rank gets before the plan that has it encoded.

    Attributes:
        media_id: of the encoder's output.
        layout: the tensors.
        data: their bytes, one after the other.
    """

    media_id: int
    layout: tuple[TensorLayout, ...]
    data: bytes | memoryview

    def encode(self) -> bytes:
        """Return the frame: the bytes of the tensors, up to 512 MB, are copied once and stand behind a header."""
        header = _media.encode(_InputHeader(self.media_id, self.layout))
        return b"".join((header[:1], len(header).to_bytes(4, "little"), header, self.data))

    @staticmethod
    def is_frame(frame: bytes) -> bool:
        """Return whether a frame has an EncoderInput, and not a plan."""
        return frame[:1] == bytes((MEDIA_VERSION,))

    @staticmethod
    def decode(frame: bytes) -> EncoderInput:
        """Return the input of a frame; raise ProtocolError if the version or the shape is unknown."""
        end = 5 + int.from_bytes(frame[1:5], "little")
        header, data = _media.decode(frame[5:end]), memoryview(frame)[end:]
        if len(data) != sum(each.num_bytes for each in header.layout):
            raise ProtocolError(f"image {header.media_id} has {len(data)} bytes, not those of its tensors")
        return EncoderInput(header.media_id, header.layout, data)

    def tensors(self) -> MediaTensors:
        """Return name |-> a copy of the tensor."""
        found, start = {}, 0
        for each in self.layout:
            raw = np.frombuffer(self.data, np.uint8, each.num_bytes, start)
            found[each.name] = raw.copy().view(each.dtype).reshape(each.shape)
            start += each.num_bytes
        return found


@dataclass(frozen=True)
class _InputHeader:
    """The beginning of an EncoderInput's frame."""

    media_id: int
    layout: tuple[TensorLayout, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of every rank. All arrays are int32; the module's docstring gives the order of application.

    The fields that most steps set come first: those behind the last one that is set are not sent.

    Attributes:
        step_id: counts the steps of an epoch from 1.
        epoch: counts the restarts of the worker group; results of an earlier epoch are dropped.
        digest: digest of the block tables, state slots and encoder outputs after points 1 to 3; of the outputs those
            in part as well.
        trimmed_lens: number of blocks that the tables of `trimmed_rows` keep, in all cache groups.
        appended_rows: numbers of tables (see BlockTables): rows, if there is one cache group.
        draft_lens: most drafted tokens of each of `draft_rows`, which decode in this step; at least 1.
        copies: [n, 2] source and destination block ids; no block is both (copy-on-write).
        swap_out: [n, 2] device block id, host block id that receives its copy.
        swap_in: [n, 2] host block id, device block id that receives its copy.
        state_copies: [n, 2] source and destination state slots; no slot is both. Of snapshots into rows, and forks.
        state_saves: [n, 2] a row's slot, slot that receives a copy of its state after the step.
        save_tails: [n] tokens of the row's chunk in this step that are not in the saved state; empty if it has all.
        state_swap_out: [n, 2] state slot, slot in host memory that receives a copy of it.
        state_swap_in: [n, 2] slot in host memory, a new row's slot that receives a copy of it.
        kv: leases and pulls of blocks that travel between replicas; applied before everything else.
        stored_orders: host blocks to write to files, or to read, which takes a while.
        command: the ranks carry it out, and empty all rows; the plan has nothing else.
        lora_loads: adapters to read into host memory, which takes a while.
        lora_drops: [n] ids of adapters to drop from host memory.
        lora_slots: [n, 2] slot, id of the adapter in host memory that it receives.
        keeps_states: a draft head is to get the hidden states of the step.
        media_drops: media_ids of encoder outputs to drop, before others are computed.
        encodes: media_ids of images to encode before the step computes tokens; their EncoderInputs came before.
        encode_shares: the share of each one's work that is done after the step, in parts of WHOLE_IMAGE. Ranks keep
            what they have of an image until it is whole, and do at least so much.
    """

    step_id: int
    epoch: int
    digest: int
    appended_rows: IntArray = sent_if_set(NO_INTS)
    appended_ids: IntArray = sent_if_set(NO_INTS)
    draft_rows: IntArray = sent_if_set(NO_INTS)
    draft_lens: IntArray = sent_if_set(NO_INTS)
    keeps_states: bool = sent_if_set(True)
    chunk_rows: IntArray = sent_if_set(NO_INTS)
    chunk_lens: IntArray = sent_if_set(NO_INTS)
    new: tuple[NewSequence, ...] = sent_if_set(())
    released_rows: IntArray = sent_if_set(NO_INTS)
    trimmed_rows: IntArray = sent_if_set(NO_INTS)
    trimmed_lens: IntArray = sent_if_set(NO_INTS)
    held_rows: IntArray = sent_if_set(NO_INTS)
    copies: PairArray = sent_if_set(NO_PAIRS)
    selected_rows: IntArray = sent_if_set(NO_INTS)
    selected_ids: IntArray = sent_if_set(NO_INTS)
    swap_out: PairArray = sent_if_set(NO_PAIRS)
    swap_in: PairArray = sent_if_set(NO_PAIRS)
    lora_slots: PairArray = sent_if_set(NO_PAIRS)
    lora_loads: tuple[LoraLoad, ...] = sent_if_set(())
    lora_drops: IntArray = sent_if_set(NO_INTS)
    command: EngineCommand | None = sent_if_set(None)
    state_copies: PairArray = sent_if_set(NO_PAIRS)
    state_saves: PairArray = sent_if_set(NO_PAIRS)
    kv: KvOrders | None = sent_if_set(None)
    stored_orders: tuple[StoredOrder, ...] = sent_if_set(())
    media_drops: IntArray = sent_if_set(NO_INTS)
    encodes: IntArray = sent_if_set(NO_INTS)
    state_swap_out: PairArray = sent_if_set(NO_PAIRS)
    state_swap_in: PairArray = sent_if_set(NO_PAIRS)
    encode_shares: IntArray = sent_if_set(NO_INTS)
    save_tails: IntArray = sent_if_set(NO_INTS)

    def encode(self) -> bytes:
        return _plans.encode(self)

    @staticmethod
    def decode(frame: bytes) -> StepPlan:
        """Return the plan of a frame; raise ProtocolError if the version or the shape is unknown."""
        return _plans.decode(frame)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the sampled tokens whose rows request them.

    Attributes:
        index: [n] int32, positions in the accompanying token array.
        chosen: [n] float32, of the sampled tokens.
        ranks: [n] int32, of the sampled tokens in the vocabulary: 1 for the most likely one.
        top_ids: [n, k] int32, most likely tokens first; k is the largest number that any row requests.
        top: [n, k] float32, log-probabilities of top_ids.
    """

    index: IntArray
    chosen: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top: FloatArray

    def select(self, positions: IntArray | RowArray) -> Logprobs | None:
        """Return the entries for `positions` (ascending, in the token array), with `index` into `positions`.

        Returns None if there are none.
        """
        keep = np.isin(self.index, positions)
        if not keep.any():
            return None
        index = np.searchsorted(positions, self.index[keep]).astype(np.int32)
        return replace(self.rows(keep), index=index)

    def rows(self, which: npt.NDArray[np.bool_] | slice) -> Logprobs:
        """Return some of the entries."""
        return Logprobs(
            self.index[which], self.chosen[which], self.ranks[which], self.top_ids[which], self.top[which]
        )

    def pack(self) -> tuple[Any, ...]:
        """Return the values to send, of which one is the width of the arrays [n, k]."""
        return self.index, self.chosen, self.ranks, self.top_ids.shape[1], self.top_ids, self.top

    @staticmethod
    def unpack(value: Any) -> Logprobs:
        index, raw_chosen, ranks, width, raw_top_ids, raw_top = value
        chosen = unpack_floats(raw_chosen)
        shape = (len(chosen), width) if width == 0 else (-1, width)
        return Logprobs(
            unpack_ints(index),
            chosen,
            unpack_ints(ranks),
            unpack_ints(raw_top_ids).reshape(shape),
            unpack_floats(raw_top).reshape(shape),
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens.

    Attributes:
        owners: [n] int32, the owner of each token: a row in a StepResult, a handle in a TokenBatch. The tokens of
            one owner are adjacent, in prompt order.
        logprobs: log-probabilities of all tokens; their `index` is the token's position in its prompt, from 1 on.
    """

    owners: IntArray
    logprobs: Logprobs

    def select(self, mask: npt.NDArray[np.bool_], owners: IntArray) -> PromptLogprobs | None:
        """Return the entries under `mask` with `owners` as their owners; None if there are none."""
        return PromptLogprobs(owners, self.logprobs.rows(mask)) if mask.any() else None


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row whose request cannot go on.

    Attributes:
        parameter: the parameter of the request whose effect failed.
        reason: one line.
    """

    row: int
    parameter: str
    reason: str


# Kinds of collectives of the ranks of a stage, in StepResult.stage_times.
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all")


@dataclass(slots=True)
class StepResult:
    """A rank's reply to a step. Rank 0's carries the tokens; other ranks sample the same tokens and only confirm.

    The rank fills it in while it computes the step; nothing changes it afterwards.

    Attributes:
        token_ids: [tokens] int32, by ascending row; empty from ranks other than 0.
        token_counts: [rows that sampled] int32, tokens of each row; empty if each has one.
        num_drafted: [rows that sampled] int32, drafted tokens of each row that were computed, of which all but one of
            its tokens were accepted; empty if there are none.
        prompt_logprobs: log-probabilities of the prompt tokens scored in the step.
        stage_times: seconds by stage (``apply``, ``forward``, ``sample``); parts of these in each kind of collective
            (COLLECTIVES); ``await``, for other pipeline stages; and ``wait``, from the
            previous reply until the arrival of this step's plan.
        num_compilations: kernel variants that the rank compiled, or loaded from disk, since it was ready.
        lora_reports: adapters that the rank has read, or failed to read, since its previous result.
        pooled: vectors of the pooled rows whose last token was computed in the step.
        command_error: why the step's command was not carried out, on no rank; empty if it was.
        failed_rows: rows whose structured output or custom logits processor failed.
        kv_reports: of leases and pulls, since the rank's previous result.
        stored_reports: ends of orders, and blocks that the rank has found in files, since its previous result.
    """

    step_id: int
    epoch: int
    rank: int
    token_ids: IntArray = sent_if_set(NO_INTS)
    logprobs: Logprobs | None = sent_if_set(None)
    stage_times: dict[str, float] = field(default_factory=dict)
    prompt_logprobs: PromptLogprobs | None = sent_if_set(None)
    num_compilations: int = sent_if_set(0)
    token_counts: IntArray = sent_if_set(NO_INTS)
    num_drafted: IntArray = sent_if_set(NO_INTS)
    lora_reports: tuple[LoraReport, ...] = sent_if_set(())
    pooled: Pooled | None = sent_if_set(None)
    command_error: str = sent_if_set("")
    failed_rows: tuple[FailedRow, ...] = sent_if_set(())
    kv_reports: tuple[KvReport, ...] = sent_if_set(())
    stored_reports: tuple[StoredReport, ...] = sent_if_set(())

    def encode(self) -> bytes:
        return _replies.encode(self)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """A rank's report of its own failure.

    Attributes:
        step_id: 0 outside a step.
        stage: the stage that failed: ``apply``, ``forward``, ``sample``, ...
        reason: one line.
        ends_rank: its process can use its GPU no more and must be replaced; otherwise the rank can join a new group.
    """

    step_id: int
    epoch: int
    rank: int
    stage: str
    reason: str
    ends_rank: bool = False

    def encode(self) -> bytes:
        return _replies.encode(self)


_plans = FrameCodec("step", VERSION, {"plan": StepPlan})
_media = FrameCodec("media", MEDIA_VERSION, {"input": _InputHeader})
_replies = FrameCodec[StepResult | StepFailure]("step", VERSION, {"ok": StepResult, "failed": StepFailure})


def decode_reply(frame: bytes) -> StepResult | StepFailure:
    """Return the reply of a frame; raise ProtocolError if the version or the shape is unknown."""
    return _replies.decode(frame)
