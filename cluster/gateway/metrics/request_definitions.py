"""Metrics of requests, as their gateway observes them."""

from __future__ import annotations

from .definition import MODEL, counter, decades, gauge, histogram, powers_of_two

# Prompts, outputs and waits of up to 1,000 s; gaps between tokens of 0.5 ms to 10 s.
SECONDS = decades(0.001, 1000.0)
GAP_SECONDS = decades(0.0005, 10.0)
TOKENS = powers_of_two(1 << 20)

UNPLACED_REQUESTS = gauge(
    "quire_gateway_waiting_requests",
    "Requests that wait in this gateway for a replica. Not part of vllm:num_requests_waiting.",
)
WARMED_TOKENS = counter(
    "quire_gateway_warmed_tokens",
    "Tokens of shared prefixes that this gateway told replicas to read from others when they became ready.",
)
OPEN_REQUESTS = gauge("quire_gateway_open_requests", "Requests of this gateway that have not ended.")
PROMPT_TOKENS = counter(
    "vllm:prompt_tokens",
    "Prompt tokens of requests whose first token came, found in the prefix cache or computed.",
)
CACHED_PROMPT_TOKENS = counter(
    "vllm:prompt_tokens_cached", "Prompt tokens of finished completions that were found in the prefix cache."
)
GENERATION_TOKENS = counter("vllm:generation_tokens", "Tokens that were sent to callers.")
REQUEST_SUCCESS = counter(
    "vllm:request_success",
    "Completions that ended, by reason: stop, length, abort (its caller left or aborted it) and error.",
    labels=(MODEL, "finished_reason"),
)
TIME_TO_FIRST_TOKEN = histogram(
    "vllm:time_to_first_token_seconds",
    "Time from a request's arrival at the gateway to its first token.",
    buckets=SECONDS,
    unit="s",
)
INTER_TOKEN_LATENCY = histogram(
    "vllm:inter_token_latency_seconds",
    "Time between two tokens of a completion; tokens that came together share the time.",
    buckets=GAP_SECONDS,
    unit="s",
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time between two tokens, once per completion.",
    buckets=GAP_SECONDS,
    unit="s",
)
E2E_LATENCY = histogram(
    "vllm:e2e_request_latency_seconds",
    "Time from a request's arrival to the end of each completion.",
    buckets=SECONDS,
    unit="s",
)
QUEUE_TIME = histogram(
    "vllm:request_queue_time_seconds",
    "Time that a completion waited before its first step.",
    buckets=SECONDS,
    unit="s",
)
PREFILL_TIME = histogram(
    "vllm:request_prefill_time_seconds",
    "Time from a completion's first step to its first token.",
    buckets=SECONDS,
    unit="s",
)
DECODE_TIME = histogram(
    "vllm:request_decode_time_seconds",
    "Time from a completion's first token to its last.",
    buckets=SECONDS,
    unit="s",
)
INFERENCE_TIME = histogram(
    "vllm:request_inference_time_seconds",
    "Time from a completion's first step to its last token.",
    buckets=SECONDS,
    unit="s",
)
REQUEST_PROMPT_TOKENS = histogram(
    "vllm:request_prompt_tokens", "Prompt tokens per completion.", buckets=TOKENS
)
REQUEST_GENERATION_TOKENS = histogram(
    "vllm:request_generation_tokens", "Generated tokens per completion.", buckets=TOKENS
)
REQUEST_PARAMS_N = histogram(
    "vllm:request_params_n", "The parameter n of requests.", buckets=powers_of_two(128)
)
REQUEST_PARAMS_MAX_TOKENS = histogram(
    "vllm:request_params_max_tokens", "The parameter max_tokens of requests.", buckets=TOKENS
)
PREEMPTED_SECONDS = counter(
    "quire_request_preempted_seconds",
    "Time that completions spent preempted or between two replicas.",
    unit="s",
)
RECOMPUTED_TOKENS = counter(
    "quire_recomputed_tokens", "Tokens that were computed again after preemptions and moves."
)
MOVES = counter(
    "quire_request_moves",
    "Sequences that a replica lost before their end, by cause: drain or failure. Another one continues them.",
    labels=(MODEL, "cause"),
)
RECOVERIES = counter(
    "quire_request_recoveries", "Completions that ended well although a replica had lost them."
)
REFUSALS = counter(
    "quire_request_refusals",
    "Calls that were refused before they began, by the kind of error: also those without a valid token.",
    labels=("reason",),
)
ERRORS = counter(
    "quire_request_errors",
    "Requests that had begun and ended with an error, by its kind.",
    labels=(MODEL, "reason"),
)
