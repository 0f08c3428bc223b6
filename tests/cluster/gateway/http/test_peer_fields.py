"""Every field of vLLM's, SGLang's and llama.cpp's requests is implemented, refused by name, or without an effect."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from quire.cluster.gateway.http.endpoints.operation import LoadLoraAdapter, UnloadLoraAdapter
from quire.cluster.gateway.http.endpoints.tokenization import DetokenizeRequest, TokenizeRequest
from quire.cluster.gateway.http.schema.anthropic_message import CountTokensRequest, MessagesRequest
from quire.cluster.gateway.http.schema.chat_completion import ChatCompletionRequest
from quire.cluster.gateway.http.schema.completion import CompletionRequest
from quire.cluster.gateway.http.schema.peer_fields import REFUSED, WITHOUT_EFFECT
from quire.cluster.gateway.http.schema.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.cluster.gateway.http.schema.request_model import FIELD_ERROR, RequestModel
from quire.cluster.gateway.http.schema.response_request import ResponseRequest

USER = {"role": "user", "content": "When?"}
# Smallest valid bodies.
BODIES: dict[type[RequestModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatCompletionRequest: {"messages": [USER]},
    ResponseRequest: {"input": "x"},
    MessagesRequest: {"messages": [USER], "max_tokens": 1},
    CountTokensRequest: {"messages": [USER]},
    EmbeddingRequest: {"input": "x"},
    PoolingRequest: {"input": "x"},
    ClassifyRequest: {"input": "x"},
    ScoreRequest: {"queries": "x", "documents": "y"},
    RerankRequest: {"query": "x", "documents": ["y"]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
    LoadLoraAdapter: {"lora_name": "x", "lora_path": "/x"},
    UnloadLoraAdapter: {"lora_name": "x"},
}

# Names of the fields of the request models, as these versions declare them: vLLM's protocol modules in
# vllm/entrypoints, SGLang's protocol.py of OpenAI and of Anthropic, and llama.cpp's tools/server/server-schema.cpp.
VLLM, SGLANG, LLAMA_CPP = "vLLM 0.32.0", "SGLang 0.5.23", "llama.cpp at 0177c34"
PEERS: dict[tuple[str, type[RequestModel]], str] = {
    (VLLM, CompletionRequest): """
        add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
        ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt
        prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id response_format
        return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs suffix temperature
        thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
        vllm_xargs watermarking
    """,
    (VLLM, ChatCompletionRequest): """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p
        min_tokens mm_payload mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
        prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id response_format
        return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs temperature
        thinking_token_budget tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens
        truncation_side use_beam_search user vllm_xargs watermarking
    """,
    (VLLM, ResponseRequest): """
        background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages
        frequency_penalty ignore_eos include include_reasoning include_stop_str_in_output input instructions
        kv_transfer_params logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p
        mm_payload mm_processor_kwargs model parallel_tool_calls presence_penalty previous_input_messages
        previous_response_id priority prompt prompt_cache_key reasoning repetition_penalty request_id
        return_mm_kwargs seed service_tier session_id skip_special_tokens stop stop_token_ids store stream
        structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation user
        vllm_xargs watermarking
    """,
    (VLLM, MessagesRequest): """
        cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata
        mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking
        tool_choice tools top_k top_p vllm_xargs watermarking
    """,
    (VLLM, CountTokensRequest): """
        chat_template_kwargs messages model output_config system thinking tool_choice tools
    """,
    (VLLM, EmbeddingRequest): """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs
        messages mm_processor_kwargs model padding priority request_id truncate_prompt_tokens
        truncation_side use_activation user
    """,
    (VLLM, PoolingRequest): """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs
        messages mm_processor_kwargs model padding priority request_id task truncate_prompt_tokens
        truncation_side use_activation user
    """,
    (VLLM, ClassifyRequest): """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message input media_io_kwargs messages mm_processor_kwargs model padding priority
        request_id truncate_prompt_tokens truncation_side use_activation user
    """,
    (VLLM, ScoreRequest): """
        cache_salt chat_template_kwargs data_1 data_2 documents instruction items max_tokens_per_doc
        max_tokens_per_query mm_processor_kwargs model padding priority queries request_id text_1 text_2
        truncate_prompt_tokens truncation_side use_activation user
    """,
    (VLLM, RerankRequest): """
        cache_salt chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query
        mm_processor_kwargs model padding priority query request_id top_n truncate_prompt_tokens
        truncation_side use_activation user
    """,
    (VLLM, TokenizeRequest): """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools
    """,
    (VLLM, DetokenizeRequest): """
        model tokens
    """,
    (VLLM, LoadLoraAdapter): """
        is_3d_lora_weight load_inplace lora_name lora_path
    """,
    (VLLM, UnloadLoraAdapter): """
        lora_int_id lora_name
    """,
    (SGLANG, CompletionRequest): """
        best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
        custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty
        ignore_eos images_config json_schema logit_bias logprobs lora_path max_tokens min_p min_tokens
        mm_processor_kwargs model n no_stop_trim presence_penalty priority prompt regex repetition_penalty
        response_format return_cached_tokens_details return_hidden_states return_routed_experts
        return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len seed
        session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options
        suffix temperature top_k top_p user watermark
    """,
    (SGLANG, ChatCompletionRequest): """
        bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
        custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key
        frequency_penalty ignore_eos images_config input_ids logit_bias logprobs lora_path
        max_completion_tokens max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens
        mm_processor_kwargs model n no_stop_trim parallel_tool_calls presence_penalty priority
        reasoning_effort regex repetition_penalty response_format return_cached_tokens_details
        return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states
        return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext return_prompt_token_ids
        return_routed_experts return_sampling_mask return_spec_tokens_details return_token_ids rid
        routed_dp_rank routed_experts_start_len sampling_logprobs_mode seed separate_reasoning session_id
        session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options
        stream_reasoning task temperature thinking tool_choice tools top_k top_logprobs top_p
        use_audio_in_video user video_config watermark
    """,
    (SGLANG, ResponseRequest): """
        background bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
        data_parallel_rank disagg_prefill_dp_rank extra_key frequency_penalty include input instructions
        max_output_tokens max_tool_calls metadata min_p model parallel_tool_calls presence_penalty
        previous_response_id priority reasoning repetition_penalty request_id routed_dp_rank service_tier
        session_id stop store stream temperature text tool_choice tools top_k top_logprobs top_p truncation
        user
    """,
    (SGLANG, MessagesRequest): """
        betas max_tokens messages metadata model output_config stop_sequences stream system temperature
        thinking tool_choice tools top_k top_p
    """,
    (SGLANG, CountTokensRequest): """
        betas messages model output_config system thinking tool_choice tools
    """,
    (SGLANG, EmbeddingRequest): """
        dimensions embed_override_token_id embed_overrides encoding_format input lora_path model priority
        rid user
    """,
    (SGLANG, ClassifyRequest): """
        input model priority rid user
    """,
    (SGLANG, TokenizeRequest): """
        add_generation_prompt add_special_tokens chat_template_kwargs continue_final_message messages model
        prompt reasoning_effort tool_choice tools
    """,
    (SGLANG, DetokenizeRequest): """
        model skip_special_tokens tokens
    """,
    (LLAMA_CPP, CompletionRequest): """
        adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser
        continue_final_message dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
        dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty generation_prompt
        grammar grammar_lazy grammar_triggers id_slot ignore_eos json_schema logit_bias logprobs lora
        max_completion_tokens max_tokens min_keep min_p mirostat mirostat_eta mirostat_tau n n_cache_reuse
        n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs
        presence_penalty preserved_tokens prompt reasoning_budget_end_tag reasoning_budget_end_tags
        reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control
        reasoning_format repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
        seed sse_ping_interval stop stream stream_options t_max_predict_ms temperature timings_per_token
        top_k top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
    """,
    (LLAMA_CPP, ChatCompletionRequest): """
        adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser
        chat_template_kwargs continue_final_message dry_allowed_length dry_base dry_multiplier
        dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty
        generation_prompt grammar grammar_lazy grammar_triggers id_slot ignore_eos json_schema logit_bias
        logprobs lora max_completion_tokens max_tokens messages min_keep min_p mirostat mirostat_eta
        mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parallel_tool_calls
        parse_tool_calls post_sampling_probs presence_penalty preserved_tokens reasoning_budget_end_tag
        reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag
        reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty
        response_fields response_format return_progress return_tokens samplers seed sse_ping_interval stop
        stream stream_options t_max_predict_ms temperature timings_per_token tool_choice tools top_k
        top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
    """,
}


@pytest.mark.parametrize(("peer", "model"), PEERS, ids=lambda each: getattr(each, "__name__", each))
def test_fields_of_peers_have_an_outcome(peer: str, model: type[RequestModel]) -> None:
    known = set(WITHOUT_EFFECT) | set(model.refused)
    for name, field in model.model_fields.items():
        known |= {name, *getattr(field.validation_alias, "choices", ())}
    assert set(PEERS[peer, model].split()) - known == set()


def test_no_field_has_two_outcomes() -> None:
    assert REFUSED.keys() & WITHOUT_EFFECT.keys() == set()


@pytest.mark.parametrize("model", BODIES)
def test_fields_that_change_the_output_are_refused_by_name(model: type[RequestModel]) -> None:
    lacking = model.refused.keys() - model.model_fields.keys()
    assert "mirostat" in lacking
    for name in lacking:
        for value in (False, "x", -7.5, ["x"]):  # False changes what is on by default
            if value is False and True not in model.refused[name][1]:
                continue
            with pytest.raises(ValidationError) as caught:
                model.model_validate(BODIES[model] | {name: value})
            (error,) = caught.value.errors()
            assert (error["type"], error["ctx"]["field"]) == (FIELD_ERROR, name), value


@pytest.mark.parametrize("model", BODIES)
def test_fields_with_the_value_that_holds_anyway_are_accepted(model: type[RequestModel]) -> None:
    for name in model.refused.keys() - model.model_fields.keys():
        for value in (None, *model.refused[name][1]):
            model.model_validate(BODIES[model] | {name: value})
    for name in WITHOUT_EFFECT.keys() - model.model_fields.keys():
        model.model_validate(BODIES[model] | {name: ["any"]})


@pytest.mark.parametrize("model", BODIES)
def test_nulls_stand_for_defaults(model: type[RequestModel]) -> None:
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    plain = model.model_validate(BODIES[model])
    given = BODIES[model].keys()
    assert model.model_validate(dict.fromkeys(optional - given) | BODIES[model]) == plain
