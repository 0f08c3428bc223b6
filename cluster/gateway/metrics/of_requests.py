"""Metrics of requests, as their gateway observes them."""

from __future__ import annotations

from .definition import MODEL, Kind, Metric, decades, powers_of_two

# Prompts, outputs and waits of up to 1,000 s; gaps between tokens of 0.5 ms to 10 s.
SECONDS = decades(0.001, 1000.0)
GAP_SECONDS = decades(0.0005, 10.0)
TOKENS = powers_of_two(1 << 20)

UNPLACED_REQUESTS = Metric(
    name="quire_gateway_waiting_requests",
    kind=Kind.GAUGE,
    help="Requests that wait in this gateway for a replica. Not part of vllm:num_requests_waiting.",
)
OPEN_REQUESTS = Metric(
    name="quire_gateway_open_requests",
    kind=Kind.GAUGE,
    help="Requests of this gateway that have not ended.",
)
PROMPT_TOKENS = Metric(
    name="vllm:prompt_tokens",
    kind=Kind.COUNTER,
    help="Prompt tokens of requests whose first token came, found in the prefix cache or computed.",
)
CACHED_PROMPT_TOKENS = Metric(
    name="vllm:prompt_tokens_cached",
    kind=Kind.COUNTER,
    help="Prompt tokens of finished completions that were found in the prefix cache.",
)
GENERATION_TOKENS = Metric(
    name="vllm:generation_tokens", kind=Kind.COUNTER, help="Tokens that were sent to callers."
)
REQUEST_SUCCESS = Metric(
    name="vllm:request_success",
    kind=Kind.COUNTER,
    help="Completions that ended, by reason: stop, length, abort (its caller left or aborted it) and error.",
    labels=(MODEL, "finished_reason"),
)
TIME_TO_FIRST_TOKEN = Metric(
    name="vllm:time_to_first_token_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a request's arrival at the gateway to its first token.",
    unit="s",
    buckets=SECONDS,
)
INTER_TOKEN_LATENCY = Metric(
    name="vllm:inter_token_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="Time between two tokens of a completion; tokens that came together share the time.",
    unit="s",
    buckets=GAP_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    name="vllm:request_time_per_output_token_seconds",
    kind=Kind.HISTOGRAM,
    help="Mean time between two tokens, once per completion.",
    unit="s",
    buckets=GAP_SECONDS,
)
E2E_LATENCY = Metric(
    name="vllm:e2e_request_latency_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a request's arrival to the end of each completion.",
    unit="s",
    buckets=SECONDS,
)
QUEUE_TIME = Metric(
    name="vllm:request_queue_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time that a completion waited before its first step.",
    unit="s",
    buckets=SECONDS,
)
PREFILL_TIME = Metric(
    name="vllm:request_prefill_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a completion's first step to its first token.",
    unit="s",
    buckets=SECONDS,
)
DECODE_TIME = Metric(
    name="vllm:request_decode_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a completion's first token to its last.",
    unit="s",
    buckets=SECONDS,
)
INFERENCE_TIME = Metric(
    name="vllm:request_inference_time_seconds",
    kind=Kind.HISTOGRAM,
    help="Time from a completion's first step to its last token.",
    unit="s",
    buckets=SECONDS,
)
REQUEST_PROMPT_TOKENS = Metric(
    name="vllm:request_prompt_tokens",
    kind=Kind.HISTOGRAM,
    help="Prompt tokens per completion.",
    buckets=TOKENS,
)
REQUEST_GENERATION_TOKENS = Metric(
    name="vllm:request_generation_tokens",
    kind=Kind.HISTOGRAM,
    help="Generated tokens per completion.",
    buckets=TOKENS,
)
REQUEST_PARAMS_N = Metric(
    name="vllm:request_params_n",
    kind=Kind.HISTOGRAM,
    help="The parameter n of requests.",
    buckets=powers_of_two(128),
)
REQUEST_PARAMS_MAX_TOKENS = Metric(
    name="vllm:request_params_max_tokens",
    kind=Kind.HISTOGRAM,
    help="The parameter max_tokens of requests.",
    buckets=TOKENS,
)
PREEMPTED_SECONDS = Metric(
    name="quire_request_preempted_seconds",
    kind=Kind.COUNTER,
    help="Time that completions spent preempted or between two replicas.",
    unit="s",
)
RECOMPUTED_TOKENS = Metric(
    name="quire_recomputed_tokens",
    kind=Kind.COUNTER,
    help="Tokens that were computed again after preemptions and moves.",
)
MOVES = Metric(
    name="quire_request_moves",
    kind=Kind.COUNTER,
    help="Sequences that a replica lost before their end, by cause: drain or failure. Another one continues them.",
    labels=(MODEL, "cause"),
)
RECOVERIES = Metric(
    name="quire_request_recoveries",
    kind=Kind.COUNTER,
    help="Completions that ended well although a replica had lost them.",
)
REFUSALS = Metric(
    name="quire_request_refusals",
    kind=Kind.COUNTER,
    help="Calls that were refused before they began, by the kind of error: also those without a valid token.",
    labels=("reason",),
)
ERRORS = Metric(
    name="quire_request_errors",
    kind=Kind.COUNTER,
    help="Requests that had begun and ended with an error, by its kind.",
    labels=(MODEL, "reason"),
)
