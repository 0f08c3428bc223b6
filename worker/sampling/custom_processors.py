"""Logits processors of others, which installed packages offer as entry points and an operator's option names.

The logits of rows that ask for a processor are gathered, rank 0 alone processes them, and all ranks get its result:
code of others need not compute the same bits on each rank. A failing processor ends the requests that it fails on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...proto.block_tables import IntArray, RowArray
from ...proto.config import EngineConfig
from ...proto.errors import ConfigError, first_line, in_one_line
from ...proto.step import FailedRow, NewSequence
from ..comm.communicator import Communicator
from ..comm.shard import Shard
from ..memory.host_to_device import to_device

GROUP = "quire.logits_processors"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """The engine of a processor.

    Attributes:
        model_path: directory of the model, with its tokenizer.
        device: of the logits.
    """

    model_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """A row of the logits that a processor gets.

    Attributes:
        arguments: of the request for this processor, a value of JSON.
        state: what `start` has returned for the request.
        prompt_token_ids, output_token_ids: the sequence before the token to sample, read-only.
    """

    arguments: Any
    state: Any
    prompt_token_ids: IntArray
    output_token_ids: IntArray


class LogitsProcessor(Protocol):
    """A processor of others. Its entry point is a callable that takes a ProcessorContext and returns one."""

    def start(self, arguments: Any, prompt_token_ids: IntArray) -> Any:
        """Return the state of a request. Raises ValueError if the arguments are not allowed.

        It is called again after a preemption, a migration or a failure. Positions may be processed again, and drafted
        tokens may be rejected, so the state must not count calls of `apply`.
        """
        ...

    def apply(self, logits: Tensor, rows: Sequence[ProcessedRow]) -> Tensor:
        """Return the processed logits; `logits` may be changed.

        Args:
            logits: [N, vocab_size] float32.
            rows: the N rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    """The request of a row: its processors' names with arguments and states."""

    num_prompt_tokens: int
    uses: tuple[tuple[str, Any, Any], ...] = ()


class CustomProcessors:
    """The processors of one rank and the rows that use them; without processors no row does.

    Args:
        processors: by name; empty on ranks other than 0.
        token_ids: [R, L] int32 on the device, the tokens of all rows.
    """

    def __init__(
        self, processors: Mapping[str, LogitsProcessor], comm: Communicator, shard: Shard, token_ids: Tensor
    ) -> None:
        self._processors = processors
        self._comm = comm
        self._shard = shard
        self._token_ids = token_ids
        self._requests: dict[int, _Request] = {}  # row |-> its request, if that uses processors
        self._failures: dict[int, str] = {}  # row |-> why its request must end

    def put(self, sequence: NewSequence) -> None:
        """Set the processors of a row to those of a new or resumed sequence."""
        processors = sequence.sampling.logits_processors
        if processors is None or not processors.extra_args:
            return
        row, num_prompt_tokens = sequence.row, processors.num_prompt_tokens
        if self._comm.rank != 0:
            self._requests[row] = _Request(num_prompt_tokens)
            return
        prompt, uses = sequence.token_ids[:num_prompt_tokens], []
        for name, text in processors.extra_args:
            try:
                arguments = json.loads(text)
                uses.append((name, arguments, self._processors[name].start(arguments, prompt)))
            except Exception as error:
                self._failures[row] = _describe(name, error)
                uses.clear()
                break
        self._requests[row] = _Request(num_prompt_tokens, tuple(uses))

    def release(self, rows: IntArray) -> None:
        """Remove the processors of rows."""
        if self._requests:
            for row in rows.tolist():
                self._requests.pop(row, None)
                self._failures.pop(row, None)

    def apply(self, logits: Tensor, rows: IntArray | RowArray, lens: IntArray | RowArray) -> Tensor:
        """Return the logits with those of rows that use processors replaced. A collective if there are such rows.

        Args:
            logits: [N, padded_len] float32.
            rows: [N], the row of each; a row with drafted tokens repeats.
            lens: [N], tokens of each sequence.
        """
        if not self._requests:
            return logits
        members = [index for index, row in enumerate(rows.tolist()) if row in self._requests]
        if not members:
            return logits
        index = to_device(np.array(members, np.int64), logits.device, torch.int64)
        gathered = self._comm.all_gather(logits[index])
        whole = gathered.transpose(0, 1).flatten(1)[:, : self._shard.full_len].contiguous()
        if self._comm.rank == 0:
            self._process(whole, rows[members].tolist(), lens[members].tolist())
        else:
            whole.zero_()
        whole = self._comm.all_reduce(whole)
        processed = logits.clone()
        processed[index, : len(self._shard)] = whole[:, self._shard.start : self._shard.end]
        return processed

    def take_failures(self) -> tuple[FailedRow, ...]:
        """Return the rows whose requests must end, and forget them."""
        if not self._failures:
            return ()
        failures = tuple(
            FailedRow(row, "sampling.extra_args", reason) for row, reason in self._failures.items()
        )
        self._failures.clear()
        return failures

    def _process(self, whole: Tensor, rows: list[int], lens: list[int]) -> None:
        """Process [n, V] logits in place."""
        for name, processor in self._processors.items():
            places: list[int] = []
            views: list[ProcessedRow] = []
            for place, (row, length) in enumerate(zip(rows, lens, strict=True)):
                for used, arguments, state in self._requests[row].uses:
                    if used == name:
                        places.append(place)
                        views.append(self._view(row, length, arguments, state))
            if views and not self._apply(name, processor, whole, places, views):
                for place, view in zip(places, views, strict=True):  # which of them does it fail on?
                    if not self._apply(name, processor, whole, [place], [view], rows[place]):
                        _log.warning("%s", self._failures[rows[place]])

    def _apply(
        self,
        name: str,
        processor: LogitsProcessor,
        whole: Tensor,
        places: list[int],
        views: list[ProcessedRow],
        blamed: int | None = None,
    ) -> bool:
        """Apply a processor to some rows; return False if it fails, with its logits unchanged.

        Args:
            blamed: the only row, whose request ends then.
        """
        try:
            processed = processor.apply(whole[places], views)
            _check(processed, (len(places), whole.shape[1]))
        except Exception as error:
            if blamed is not None:
                self._failures[blamed] = _describe(name, error)
            return False
        whole[places] = processed
        return True

    def _view(self, row: int, length: int, arguments: Any, state: Any) -> ProcessedRow:
        tokens = self._token_ids[row, :length].cpu().numpy()
        tokens.setflags(write=False)  # on a CPU they are the row's own
        num_prompt_tokens = self._requests[row].num_prompt_tokens
        return ProcessedRow(arguments, state, tokens[:num_prompt_tokens], tokens[num_prompt_tokens:])


def load_custom_processors(
    config: EngineConfig, comm: Communicator, shard: Shard, token_ids: Tensor
) -> CustomProcessors:
    """Return the processors that the configuration names.

    Raises:
        ConfigError: no installed package offers one of them, or it cannot be loaded.
    """
    names, model = config.parallel.logits_processor_names, config.model
    context = ProcessorContext(model.path, model.vocab_size, model.eos_token_ids, token_ids.device)
    offered = {each.name: each for each in entry_points(group=GROUP)} if names else {}
    processors: dict[str, LogitsProcessor] = {}
    for name in names if comm.rank == 0 else ():
        if name not in offered:
            known = ", ".join(sorted(offered)) or "none"
            raise ConfigError(
                f"logits_processors has {name!r}, which no installed package offers in the entry points "
                f"{GROUP}; there are: {known}"
            )
        try:
            processors[name] = offered[name].load()(context)
        except Exception as error:
            raise ConfigError(f"logits processor {name!r} cannot be loaded: {first_line(error)}") from error
    return CustomProcessors(processors, comm, shard, token_ids)


def _check(processed: Any, shape: tuple[int, int]) -> None:
    """Raises ValueError for logits from which no token can be sampled."""
    if not isinstance(processed, Tensor) or tuple(processed.shape) != shape:
        given = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
        raise ValueError(f"apply returned {given}, must return logits {list(shape)}")
    largest = processed.amax(dim=1)  # NaN if there is one
    if not largest.isfinite().all():
        raise ValueError("apply returned logits that are not numbers, infinite, or -inf for all tokens")


def _describe(name: str, error: Exception) -> str:
    return f"logits processor {name!r} failed: {in_one_line(error)}"
