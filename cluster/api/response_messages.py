"""What is answered, as quire.v1 has it and as Python does, both ways; shared by the gateway and the clients."""

from __future__ import annotations

from collections.abc import Iterable

from ...proto import admin_pb2, inference_pb2
from ...proto.errors import ProtocolError
from ...proto.stream import FinishReason, RankStatus, ReplicaStatus, Timings
from ..requests.outputs import (
    Completion,
    Delta,
    Event,
    Finished,
    Output,
    PromptLogprobs,
    Started,
    TokenLogprobs,
    Usage,
)

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}


def event_to_message(event: Event) -> inference_pb2.GenerateEvent:
    if isinstance(event, Delta):
        return inference_pb2.GenerateEvent(delta=_delta_to_message(event))
    if isinstance(event, Finished):
        return inference_pb2.GenerateEvent(finished=_finished_to_message(event))
    if isinstance(event, PromptLogprobs):
        return inference_pb2.GenerateEvent(prompt_logprobs=_prompt_logprobs_to_message(event))
    started = inference_pb2.Started(
        request_id=event.request_id, model=event.model, prompt_tokens=event.prompt_tokens
    )
    return inference_pb2.GenerateEvent(started=started)


def event_from_message(message: inference_pb2.GenerateEvent) -> Event:
    """Raises ProtocolError on an event of a later version of quire."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _delta_from_message(message.delta)
    if kind == "finished":
        return _finished_from_message(message.finished)
    if kind == "prompt_logprobs":
        return _prompt_logprobs_from_message(message.prompt_logprobs)
    if kind == "started":
        started = message.started
        return Started(started.request_id, started.model, started.prompt_tokens)
    raise ProtocolError("the server sent an event that this client does not know")


def completion_to_message(completion: Completion) -> inference_pb2.GenerateResponse:
    outputs = (
        inference_pb2.Output(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids,
            logprobs=map(_logprobs_to_message, output.logprobs),
            finished=_finished_to_message(output.finished),
        )
        for output in completion.outputs
    )
    response = inference_pb2.GenerateResponse(
        request_id=completion.request_id, model=completion.model, outputs=outputs
    )
    if completion.prompt_logprobs is not None:
        known = tuple(entry for entry in completion.prompt_logprobs if entry is not None)
        response.prompt_logprobs.CopyFrom(_prompt_logprobs_to_message(PromptLogprobs(1, known)))
    return response


def completion_from_message(message: inference_pb2.GenerateResponse) -> Completion:
    outputs = (
        Output(
            text=output.text,
            token_ids=tuple(output.token_ids),
            logprobs=_all_logprobs(output.logprobs),
            finished=_finished_from_message(output.finished),
        )
        for output in message.outputs
    )
    of_prompt = None
    if message.HasField("prompt_logprobs"):
        of_prompt = (None, *_prompt_logprobs_from_message(message.prompt_logprobs).logprobs)
    return Completion(message.request_id, message.model, tuple(outputs), of_prompt)


def replica_to_message(status: ReplicaStatus, problem: str) -> admin_pb2.Replica:
    """`problem`: why the gateway does not count on the replica; empty when it does."""
    return admin_pb2.Replica(
        replica_id=status.replica_id,
        model=status.model,
        ready=not problem,
        problem=problem,
        ranks=map(_rank_to_message, status.ranks),
        kv=admin_pb2.KvUse(
            block_size=status.block_size,
            num_blocks=status.num_blocks,
            num_used_blocks=status.num_used_blocks,
            num_cached_blocks=status.num_cached_blocks,
            peak_used_blocks=status.peak_used_blocks,
            num_used_tokens=status.num_used_tokens,
            mean_kv_fragmentation=status.mean_kv_fragmentation,
            prefix_query_tokens=status.prefix_query_tokens,
            prefix_hit_tokens=status.prefix_hit_tokens,
            num_host_blocks=status.num_host_blocks,
            num_used_host_blocks=status.num_used_host_blocks,
            num_cached_host_blocks=status.num_cached_host_blocks,
            num_swapped_blocks=status.num_swapped_blocks,
        ),
        queue=admin_pb2.Queue(
            num_waiting=status.num_waiting,
            num_running=status.num_running,
            num_finished=status.num_finished,
            num_preemptions=status.num_preemptions,
        ),
        num_steps=status.num_steps,
        uptime_s=status.uptime_s,
        mean_plan_wait_s=status.mean_plan_wait_s,
    )


def _rank_to_message(rank: RankStatus) -> admin_pb2.Rank:
    return admin_pb2.Rank(rank=rank.rank, pid=rank.pid, node=rank.node, device=rank.device, stage=rank.stage)


def _delta_to_message(delta: Delta) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        sequence_number=delta.sequence_number,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=map(_logprobs_to_message, delta.logprobs),
    )


def _delta_from_message(message: inference_pb2.Delta) -> Delta:
    logprobs = _all_logprobs(message.logprobs)
    return Delta(message.text, tuple(message.token_ids), logprobs, message.sequence_number, message.index)


def _prompt_logprobs_to_message(event: PromptLogprobs) -> inference_pb2.PromptLogprobs:
    return inference_pb2.PromptLogprobs(start=event.start, logprobs=map(_logprobs_to_message, event.logprobs))


def _prompt_logprobs_from_message(message: inference_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(message.start, _all_logprobs(message.logprobs))


def _logprobs_to_message(entry: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        chosen=entry.chosen, top_token_ids=entry.top_token_ids, top_logprobs=entry.top_logprobs
    )


def _all_logprobs(messages: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(message.chosen, tuple(message.top_token_ids), tuple(message.top_logprobs))
        for message in messages
    )


def _finished_to_message(finished: Finished) -> inference_pb2.Finished:
    usage, timings, stop_reason = finished.usage, finished.timings, finished.stop_reason
    return inference_pb2.Finished(
        index=finished.index,
        reason=_REASONS[finished.reason],
        stop_string=stop_reason if isinstance(stop_reason, str) else None,
        stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        timings=inference_pb2.Timings(
            queued_s=timings.queued_s,
            prefill_s=timings.prefill_s,
            decode_s=timings.decode_s,
            preempted_s=timings.preempted_s,
            recomputed_tokens=timings.recomputed_tokens,
            num_moves=timings.num_moves,
        ),
        cumulative_logprob=finished.cumulative_logprob,
        score=finished.score,
    )


def _finished_from_message(message: inference_pb2.Finished) -> Finished:
    reason = _REASONS_BACK.get(message.reason)
    if reason is None:
        raise ProtocolError(
            f"the server ended the answer for a reason that this client does not know: {message.reason}"
        )
    stopped_by = message.WhichOneof("stopped_by")
    usage, timings = message.usage, message.timings
    return Finished(
        reason=reason,
        stop_reason=None if stopped_by is None else getattr(message, stopped_by),
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        timings=Timings(
            timings.queued_s,
            timings.prefill_s,
            timings.decode_s,
            timings.preempted_s,
            timings.recomputed_tokens,
            timings.num_moves,
        ),
        index=message.index,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        score=message.score if message.HasField("score") else None,
    )
