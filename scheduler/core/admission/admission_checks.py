"""Admission checks: decide whether a request can be queued.

Gateways validate requests. The checks here need the scheduler's state, or guard against requests that would fail a
step of the ranks, and with it all other requests.
"""

from __future__ import annotations

from ....proto.config import EngineConfig
from ....proto.errors import DeadlineExpired, InvalidRequest, Overloaded, ProtocolError, QuireError
from ....proto.lora import MAX_LORA_NAME_CHARS, MAX_LORA_PATH_CHARS
from ....proto.stream import Submit
from ..queue.backlog import Job
from ..queue.deadlines import deadline_of
from ..queue.policy import rank_of
from ..state import SchedulerState
from .forecast import Forecast


def max_len_of(config: EngineConfig, submit: Submit) -> int:
    """Return the number of tokens, prompt included, at which an output ends by length."""
    if submit.pooling is not None:
        return len(submit.prompt_token_ids)
    most, max_tokens = config.max_servable_tokens, submit.sampling.max_tokens
    return most if max_tokens is None else min(most, len(submit.prompt_token_ids) + max_tokens)


def check_admission(
    state: SchedulerState, forecast: Forecast, gateway: bytes, submit: Submit, now: float
) -> QuireError | None:
    """Return the error with which to reject a request, or None if it can be queued.

    Under the policy ``fair``, a full queue makes room by refusing a waiting request of the tenant with the most work.
    """
    config, limits = state.config, state.config.scheduler
    handles = range(submit.handle, submit.handle + submit.sampling.num_sequences)
    in_use = [handle for handle in handles if (gateway, handle) in state.requests]
    if in_use:
        return ProtocolError(f"handle {in_use[0]} is in use")
    checks = (
        *(_check_kind, _check_prompt, _check_vocabulary, _check_generated),
        *(_check_beams, _check_adapter, _check_media),
    )
    for check in checks:
        error = check(config, submit)
        if error is not None:
            return error
    deadline = deadline_of(submit, now)
    if deadline is not None and not deadline > now:  # rejects NaN as well
        return DeadlineExpired(f"request {submit.request_id}: its deadline had passed when it came")
    if submit.generated_token_ids.size:
        return None  # it ran elsewhere, and goes before all that never ran
    is_full = len(state.waiting) >= limits.max_queue_len
    if not is_full and deadline is None:
        return None
    job = _job_of(state, submit)
    if is_full and not _make_room(state, forecast, job):
        return _queue_is_full(state, forecast, job)
    return None if deadline is None else forecast.refusal(submit.request_id, job, deadline, now)


def _make_room(state: SchedulerState, forecast: Forecast, job: Job) -> bool:
    """Refuse a waiting request of a tenant that crowds out the job's tenant; return whether there was one."""
    crowding = state.waiting.crowding_sequence(job.tenant)
    if crowding is None:
        return False
    error = _queue_is_full(state, forecast, state.waiting.backlog.job_of(crowding))
    state.fail_request((crowding.gateway, crowding.handle), error)
    return True


def _queue_is_full(state: SchedulerState, forecast: Forecast, job: Job) -> Overloaded:
    return Overloaded(
        f"{len(state.waiting)} requests are waiting already; come back later",
        retry_after_s=forecast.retry_after_s(job),
    )


def _job_of(state: SchedulerState, submit: Submit) -> Job:
    """Return the expected work of a request."""
    params, num_prompt_tokens = submit.sampling, len(submit.prompt_token_ids)
    has_eos = bool(state.config.model.eos_token_ids) and not params.ignore_eos
    may_stop = submit.pooling is None and (has_eos or bool(params.stop_token_ids or params.stop))
    most = max_len_of(state.config, submit) - num_prompt_tokens
    num_sequences = params.beam_width or params.num_sequences
    row_steps = num_sequences * state.pace.expect_tokens(most, may_stop=may_stop)
    return Job(num_sequences, num_prompt_tokens, row_steps, submit.tenant, rank_of(submit))


def _check_kind(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    """Check that the ranks can do what is asked: generate, or pool one prompt."""
    model = config.model
    if submit.pooling is None:
        return None if model.generates else InvalidRequest("model", f"{model.name} does not generate text")
    if model.pooling is None:
        return InvalidRequest("model", f"{model.name} does not pool prompts")
    params = submit.sampling
    if submit.generated_token_ids.size or params.num_sequences > 1 or params.beam_width is not None:
        return InvalidRequest(
            "pooling", "is of one prompt: n, beam_width and generated_token_ids are not allowed"
        )
    return None


def _check_prompt(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    num_tokens = len(submit.prompt_token_ids)
    most = config.max_servable_tokens - (submit.pooling is None)  # an output has at least one token
    if not 1 <= num_tokens <= most:
        return InvalidRequest("prompt", f"has {num_tokens} tokens, must have 1 to {most}")
    return _check_whole_prompt(config, num_tokens) if config.model.sees_whole_prompt else None


def _check_whole_prompt(config: EngineConfig, num_tokens: int) -> InvalidRequest | None:
    """Check that a step can compute the prompt."""
    most = config.scheduler.max_num_batched_tokens
    if num_tokens <= most:
        return None
    return InvalidRequest(
        "prompt",
        f"has {num_tokens} tokens, all of which attend to each other, must have at most {most} "
        "(max_num_batched_tokens)",
    )


def _check_vocabulary(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    vocab_size = config.model.vocab_size
    fields = {"prompt": submit.prompt_token_ids, "generated_token_ids": submit.generated_token_ids}
    for field, ids in fields.items():
        if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
            problem = f"has token ids from {ids.min()} to {ids.max()}, must be from 0 to {vocab_size - 1}"
            return InvalidRequest(field, problem)
    return None


def _check_generated(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    num_generated, params = len(submit.generated_token_ids), submit.sampling
    if num_generated == 0:
        return None
    if params.num_sequences > 1 or params.beam_width is not None:
        return InvalidRequest(
            "generated_token_ids", "are of one output: n, best_of and beam_width are not allowed"
        )
    most = max_len_of(config, submit) - len(submit.prompt_token_ids)
    if num_generated >= most:
        problem = f"are {num_generated} tokens, must be fewer than the {most} that the output may have"
        return InvalidRequest("generated_token_ids", problem)
    return None


def _check_beams(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    params = submit.sampling
    if params.beam_width is None:
        return None
    # A search continues with this many different tokens in its first step, none of them a stop token.
    num_stops = len({*params.stop_token_ids, *config.model.eos_token_ids})
    most = min(config.scheduler.max_num_seqs, config.model.vocab_size - num_stops)
    if params.beam_width > most:
        return InvalidRequest("sampling.beam_width", f"is {params.beam_width}, must be at most {most}")
    return None


def _check_media(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    """Check that the model reads images, and that the prompt has a place for each embedding of each image."""
    vision = config.model.vision
    if not submit.media:
        return None
    if vision is None:
        return InvalidRequest("media", f"has images, and {config.model.name} reads none")
    sizes = {item.digest: item.num_embeddings * config.encoder_row_bytes for item in submit.media}
    room = config.encoder_cache_bytes
    if config.model.sees_whole_prompt and len(sizes) > 1 and sum(sizes.values()) > room:
        return InvalidRequest(
            "media",
            f"has images with {sum(sizes.values())} bytes of embeddings, which one step reads, must have at most "
            f"{room} (encoder_cache_memory)",
        )
    for index, item in enumerate(submit.media):
        tokens = submit.prompt_token_ids[item.start : item.end]
        problem = vision.check_item(item, tokens)
        if item.last_time >= (longest := config.model.max_model_len):
            problem = f"lasts up to the position {item.last_time} in time, the context has {longest}"
        most = config.scheduler.max_num_batched_tokens
        if not vision.cuts_images and item.num_tokens > most:
            problem = f"has {item.num_tokens} tokens, a step computes at most {most} (max_num_batched_tokens)"
        if problem:
            return InvalidRequest("media", f"image {index + 1} {problem}")
    return None


def _check_adapter(config: EngineConfig, submit: Submit) -> InvalidRequest | None:
    reference = submit.lora
    if reference is None:
        return None
    if config.lora is None:
        return InvalidRequest(
            "model", f"is adapter {reference.name!r}, and this replica runs without enable_lora"
        )
    for what, text, most in (
        ("name", reference.name, MAX_LORA_NAME_CHARS),
        ("path", reference.path, MAX_LORA_PATH_CHARS),
    ):
        if not 1 <= len(text) <= most:
            return InvalidRequest(
                "model", f"has an adapter whose {what} has {len(text)} characters, must have 1 to {most}"
            )
    return None
