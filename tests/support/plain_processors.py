"""LogitsProcessorState of rows without structured outputs and custom processors, for tests without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from quire.worker.comm.communicator import SingleRank
from quire.worker.comm.shard import Shard
from quire.worker.sampling.custom_processors import CustomProcessors
from quire.worker.sampling.logits_processors import LogitsProcessorState
from quire.worker.structured.constraint_state import ConstraintState


def plain_processors(shard: Shard, token_ids: Tensor) -> LogitsProcessorState:
    """Return the state of rows with these tokens, [R, L] int32."""
    model: Any = SimpleNamespace(path="", vocab_size=shard.full_len, eos_token_ids=())
    constraints = ConstraintState(model, shard, len(token_ids))
    return LogitsProcessorState(
        shard, token_ids, constraints, CustomProcessors({}, SingleRank(), shard, token_ids)
    )
