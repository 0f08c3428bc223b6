"""Refusals: why a request cannot be taken, said before anything is made of it.

Gateways check requests themselves. What is looked at here is what only the scheduler knows, and what would end a step
of the ranks, and with it the requests of everybody.
"""

from __future__ import annotations

from ...proto.config import EngineConfig
from ...proto.errors import DeadlineExpired, InvalidRequest, Overloaded, ProtocolError, QuireError
from ...proto.stream import Submit
from .state import SchedulerState


def length_limit(config: EngineConfig, submit: Submit) -> int:
    """Tokens, prompt included, at which an answer ends by length."""
    most, max_tokens = config.max_servable_tokens, submit.sampling.max_tokens
    return most if max_tokens is None else min(most, len(submit.prompt_token_ids) + max_tokens)


def find_problem(state: SchedulerState, gateway: bytes, submit: Submit) -> QuireError | None:
    """Why the request is refused; None: it can be queued."""
    config, limits = state.config, state.config.scheduler
    handles = range(submit.handle, submit.handle + submit.sampling.num_sequences)
    taken = [handle for handle in handles if (gateway, handle) in state.requests]
    if taken:
        return ProtocolError(f"handle {taken[0]} is in use")
    for look_at in (_prompt, _vocabulary, _generated, _beams):
        problem = look_at(config, submit)
        if problem is not None:
            return problem
    if len(state.waiting) >= limits.max_queue_len:
        return Overloaded(f"{len(state.waiting)} requests are waiting already; come back later")
    if submit.timeout_s is not None and not submit.timeout_s > 0:  # nor if it is not a number
        return DeadlineExpired(f"request {submit.request_id}: its deadline had passed when it came")
    return None


def _prompt(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    num_tokens, most = len(submit.prompt_token_ids), config.max_servable_tokens
    if not 1 <= num_tokens < most:
        return InvalidRequest("prompt", f"has {num_tokens} tokens, must have 1 to {most - 1}")
    return None


def _vocabulary(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    vocab_size = config.model.vocab_size
    given = {"prompt": submit.prompt_token_ids, "generated_token_ids": submit.generated_token_ids}
    for field, ids in given.items():
        if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
            problem = f"has token ids from {ids.min()} to {ids.max()}, must be from 0 to {vocab_size - 1}"
            return InvalidRequest(field, problem)
    return None


def _generated(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    num_generated, params = len(submit.generated_token_ids), submit.sampling
    if num_generated == 0:
        return None
    if params.num_sequences > 1 or params.beam_width is not None:
        return InvalidRequest(
            "generated_token_ids", "are of one answer: neither n, best_of nor beam_width goes"
        )
    most = length_limit(config, submit) - len(submit.prompt_token_ids)
    if num_generated >= most:
        problem = f"are {num_generated} tokens, must be fewer than the {most} that the answer may have"
        return InvalidRequest("generated_token_ids", problem)
    return None


def _beams(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    params = submit.sampling
    if params.beam_width is None:
        return None
    # A search must be able to go on with as many different tokens in its first step.
    num_stops = len({*params.stop_token_ids, *config.model.eos_token_ids})
    most = min(config.scheduler.max_num_seqs, config.model.vocab_size - num_stops)
    if params.beam_width > most:
        return InvalidRequest("sampling.beam_width", f"is {params.beam_width}, must be at most {most}")
    return None
