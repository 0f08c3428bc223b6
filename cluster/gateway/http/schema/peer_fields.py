"""Fields of other servers' requests that no endpoint here has: those that are refused, and those without an effect.

A field that would change the output is refused by its name, unless its value asks for what happens anyway.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
# Why a field is refused, and the values that are as good as none.
Refusal = tuple[str, tuple[Any, ...]]

# Of a switch that is off, and of a list that is empty.
UNSET: tuple[Any, ...] = (False, 0, "", [], {})

_SAMPLER = "the server has no such sampler"
_FORM = "use structured_outputs"
_IDS = "use return_token_ids"
_NO_PARTS = "the response has no such part"
_TAGS = "the tags of the model's own format are used"
_MEDIA = "the model reads and writes text only"
_TRANSFER = "this server computes and keeps the KV cache of its requests itself"

# Fields |-> their refusal.
_REFUSED: dict[str, Refusal] = {
    # Constraints under other names.
    "guided_json guided_regex guided_choice guided_grammar": (_FORM, UNSET),
    "json_schema grammar regex ebnf structural_tag": (f"{_FORM} or response_format", UNSET),
    "guided_decoding_backend": ("the server option --structured-outputs-backend chooses it", UNSET),
    "guided_whitespace_pattern": ("use structured_outputs.disable_any_whitespace", UNSET),
    "grammar_lazy grammar_triggers grammar_type": ("use structured_outputs.structural_tag", UNSET),
    # Samplers, and settings under other names.
    "typical_p": (_SAMPLER, (1,)),
    "top_n_sigma adaptive_target": (_SAMPLER, (-1, 0)),
    "mirostat dynatemp_range dry_multiplier xtc_probability min_keep": (_SAMPLER, UNSET),
    "samplers": ("the order of samplers is fixed", UNSET),
    "repeat_penalty": ("use repetition_penalty", (1,)),
    "n_predict": ("use max_tokens", UNSET),
    "n_probs": ("use logprobs", UNSET),
    "n_cmpl": ("use n", (1,)),
    "post_sampling_probs sampling_logprobs_mode": ("log-probabilities are those before sampling", UNSET),
    "logprob_token_ids": ("use top_logprobs or logprobs", UNSET),
    "n_indent": ("use structured_outputs.regex", UNSET),
    "stop_regex": ("use stop", UNSET),
    "no_stop_trim": ("use include_stop_str_in_output", UNSET),
    "t_max_predict_ms": ("use the header X-Request-Timeout", (-1, 0)),
    "custom_logit_processor custom_params": ("use vllm_xargs", UNSET),
    "watermark watermarking": (_SAMPLER, UNSET),
    "best_of early_stopping": ("use n, or /v1/completions", (1,)),
    # Prompts.
    "functions": ("use tools", UNSET),
    "function_call": ("use tool_choice", UNSET),
    "suffix": ("the prompt is continued at its end only", UNSET),
    "echo": ("the response has the new message only", UNSET),
    "add_special_tokens": ("the chat template adds its own", (False,)),
    "truncation_side": ("the end of a prompt is kept", ("left",)),
    "max_tokens_per_doc max_tokens_per_query": (
        "use truncate_prompt_tokens, which cuts whole prompts",
        UNSET,
    ),
    "prompt_embeds embed_override_token_id embed_overrides": ("send text or token ids", UNSET),
    "input_ids": ("send token ids as the prompt of /v1/completions", UNSET),
    "continue_final_message": ("a prompt is always continued", UNSET),
    "max_completion_tokens": ("use max_tokens", UNSET),
    "chat_template_kwargs": ("prompts of this endpoint have no variables", UNSET),
    "input_type": ("put the instruction of a prompt before its text", UNSET),
    "session_params": ("send the whole conversation: its prefix is in the cache", UNSET),
    "conversation": ("use previous_response_id", UNSET),
    "previous_input_messages": ("use previous_response_id or input", UNSET),
    "web_search_options": ("the server reads nothing from the web", UNSET),
    "mcp_servers container": ("the server has no tools of its own", UNSET),
    "context_management": ("a conversation is never shortened", UNSET),
    "thinking task": ("use chat_template_kwargs", UNSET),
    "prompt_cache_options": ("the prefix cache needs no options", UNSET),
    "verbosity": ("the model has no such setting", ("medium",)),
    # Media, adapters, other servers.
    "audio mm_payload return_mm_kwargs": (_MEDIA, UNSET),
    "modalities": (_MEDIA, (["text"],)),
    "lora lora_path": ("name the adapter as model", UNSET),
    "extra_key": ("use cache_salt", UNSET),
    "kv_transfer_params ec_transfer_params": (_TRANSFER, UNSET),
    "is_3d_lora_weight": ("the files of an adapter tell its form", UNSET),
    # Parts of the response.
    "include_reasoning separate_reasoning stream_reasoning parse_tool_calls": (
        "reasoning and tool calls are always parts of their own",
        (True,),
    ),
    "reasoning_format": (
        "reasoning is always a part of its own",
        ("auto", "deepseek"),
    ),
    "chat_format chat_parser generation_prompt": (_TAGS, UNSET),
    "reasoning_control": (_NO_PARTS, UNSET),
    "reasoning_budget_tokens thinking_budget_tokens": ("use thinking_token_budget", (-1,)),
    "return_tokens return_prompt_token_ids return_input_ids_in_sglext return_output_ids_in_sglext": (
        _IDS,
        UNSET,
    ),
    "return_tokens_as_token_ids": (_IDS, UNSET),
    "return_hidden_states return_routed_experts return_meta_info return_sampling_mask": (_NO_PARTS, UNSET),
    "return_spec_tokens_details return_token_offsets return_prompt_text verbose": (_NO_PARTS, UNSET),
    "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64": (_NO_PARTS, UNSET),
    "return_cached_tokens_details": ("the usage has prompt_tokens_details.cached_tokens", UNSET),
    "return_progress timings_per_token": ("the end of a stream has the timings", UNSET),
    "response_fields": ("the response has all its fields", UNSET),
    "enable_response_messages": (_NO_PARTS, UNSET),
    "embed_dtype": ("numbers are float32", ("float32",)),
    "endianness": ("base64 is little-endian", ("native", "little")),
}

# Fields |-> why they have no effect here.
_WITHOUT_EFFECT: dict[str, str] = {
    "mirostat_tau mirostat_eta dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n": "of samplers",
    "dry_sequence_breakers xtc_threshold adaptive_decay repeat_last_n preserved_tokens": "of samplers",
    "reasoning_budget_start_tag reasoning_budget_end_tags reasoning_budget_end_tag": "of reasoning_budget_tokens",
    "reasoning_budget_message": "of reasoning_budget_tokens",
    "routed_experts_prompt_start routed_experts_start_len": "of return_routed_experts",
    "n_keep n_discard": "a prompt longer than the context is refused",
    "cache_prompt n_cache_reuse id_slot prompt_cache_key prompt_cache_retention": "prefixes are always cached",
    "session_id rid request_id bootstrap_host bootstrap_port bootstrap_room": "names or places a request",
    "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank": "names or places a request",
    "custom_labels metadata user safety_identifier service_tier store inference_geo": "for the records of a provider",
    "media_io_kwargs images_config video_config": "of the decoders of media",
    "mm_processor_kwargs": "of images, in conversations alone",
    "max_dynamic_patch min_dynamic_patch use_audio_in_video": "of media, which are refused",
    "backend_sampling prediction speed padding": "changes the speed only",
    "stream_interval sse_ping_interval": "changes the size and the number of events only",
    "spaces_between_special_tokens": "only old tokenizers of transformers join special tokens by spaces",
    "betas cache_control": "of Anthropic's service",
}


def _each(table: dict[str, T]) -> dict[str, T]:
    return {name: entry for names, entry in table.items() for name in names.split()}


REFUSED = _each(_REFUSED)
WITHOUT_EFFECT = _each(_WITHOUT_EFFECT)


def reason_to_refuse(refusal: Refusal, value: Any) -> str | None:
    """Return why a field with this value is refused; None if it is not."""
    reason, neutral = refusal
    is_same = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
    return None if value is None or is_same else reason
