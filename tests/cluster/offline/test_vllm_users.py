"""Programs written for vLLM's LLM run with only the import changed."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from narrowing import not_none

from quire import LLM, BeamSearchParams, EngineArgs, LoRARequest, SamplingParams, TextPrompt, TokensPrompt
from quire.cluster.text.requests.chat_messages import Message
from quire.proto.errors import InvalidRequest

PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
TEMPLATE = """{%- for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}{% if shout %}LOUD {% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"""
CONVERSATION: list[Message] = [{"role": "user", "content": "What is a quire?"}]


@pytest.fixture(scope="module")
def model_dir(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("users") / "model"
    shutil.copytree(make_model("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_sampling_params_may_be_positional(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.finished
        assert output.outputs[0].finished()
        assert isinstance(output.outputs[0].text, str)


def test_default_is_sixteen_tokens(llm: LLM) -> None:
    for params in (SamplingParams(ignore_eos=True), SamplingParams(ignore_eos=True, temperature=0)):
        assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)] == [16] * 3


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
    num_tokens = len(not_none(output.prompt_token_ids)) + len(output.outputs[0].token_ids)
    assert num_tokens == llm.config.max_servable_tokens
    assert output.outputs[0].finish_reason == "length"


def test_dictionaries_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms: list[Any] = [
        PROMPTS[0],
        {"prompt": PROMPTS[0]},
        TextPrompt(prompt=PROMPTS[0]),
        {"prompt_token_ids": ids},
        TokensPrompt(prompt_token_ids=ids, prompt=PROMPTS[0]),
        {"prompt_token_ids": np.array(ids)},
        {"prompt": PROMPTS[0], "multi_modal_data": None},
    ]
    together = llm.generate(forms, params)
    alone = [output for form in forms for output in llm.generate(form, params)]
    for output in together + alone:
        assert output.outputs == together[0].outputs
        assert type(output.prompt_token_ids) is list
        assert output.prompt_token_ids == ids
        assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    texts = [PROMPTS[0]] * 3 + [None, PROMPTS[0], None, PROMPTS[0]]
    assert [output.prompt for output in together] == texts


@pytest.mark.parametrize(
    ("prompts", "kind", "problem"),
    [
        ({"a", "b"}, TypeError, "prompts: is of type set"),
        (None, TypeError, "prompts: is of type NoneType"),
        (iter(PROMPTS), TypeError, "prompts: is of type list_iterator"),
        ([PROMPTS[0], 7], TypeError, r"prompts\[1\]: is of type int"),
        ([{1, 2}], TypeError, r"prompts\[0\]: is of type set"),
        ([b"ab"], TypeError, r"prompts\[0\]: is of type bytes"),
        ({}, ValueError, "prompts: has neither prompt nor prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, ValueError, r"image\[0\]: is of type int"),
        ({"prompt": 7}, TypeError, "prompts.prompt: is of type int, must be text"),
        ({"prompt_token_ids": {1, 2}}, TypeError, "prompts.prompt_token_ids: is of type set"),
        ({"prompt_token_ids": "ab"}, TypeError, "prompts.prompt_token_ids: is of type str"),
        ([{"prompt_token_ids": [10**9]}], ValueError, "is 1000000000, must be a token id"),
        ("", ValueError, "prompt: is empty"),
    ],
)
def test_other_prompts_are_refused(llm: LLM, prompts: Any, kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem) as caught:
        llm.generate(prompts)
    assert isinstance(caught.value, InvalidRequest)


def test_one_params_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.01 * i, max_tokens=i + 1, ignore_eos=True) for i in range(3)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)] == [1, 2, 3]
    with pytest.raises(ValueError, match="sampling_params: are 2 for 3 prompts"):
        llm.generate(PROMPTS, params[:2])


def test_fields_of_params_can_be_set(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    params.max_tokens, params.ignore_eos = 3, True
    assert len(llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids) == 3
    params.max_tokens = -1
    with pytest.raises(ValueError, match="max_tokens: is -1"):
        llm.generate(PROMPTS[0], params)


def test_seed_repeats_and_minus_one_does_not(llm: LLM) -> None:
    def tokens(seed: int | None) -> list[list[int]]:
        params = SamplingParams(seed=seed, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate([PROMPTS[0]] * 3, params)]

    first, second, third = tokens(7)
    assert first == second == third
    for seed in (-1, None):
        assert len(set(map(tuple, tokens(seed)))) == 3


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_all(llm: LLM, top_k: int) -> None:
    params = SamplingParams(top_k=top_k, seed=1)
    assert llm.generate(PROMPTS, params) is not None
    everything = SamplingParams(top_k=llm.config.model.vocab_size, seed=1)
    pairs = zip(llm.generate(PROMPTS, params), llm.generate(PROMPTS, everything), strict=True)
    assert all(one.outputs == other.outputs for one, other in pairs)


def test_min_tokens_hold_stop_strings_back(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], free)
    stop = next(character for character in whole.outputs[0].text if character.isalpha())
    stopped = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop)  # type: ignore[arg-type]
    first = llm.generate(PROMPTS[0], stopped)[0].outputs[0]
    assert (first.stop_reason, len(first.token_ids) < 12) == (stop, True)
    stopped.min_tokens = 12
    held = llm.generate(PROMPTS[0], stopped)[0].outputs[0]
    assert (held.text, held.finish_reason) == (whole.outputs[0].text, "length")


def test_rank_is_that_in_the_vocabulary(llm: LLM) -> None:
    """Also of tokens that are not among the most likely ones that were asked for."""
    vocab_size = llm.config.model.vocab_size
    with LLM(llm.config.model.path, device="cpu", num_kv_blocks=64, max_logprobs=-1) as unlimited:
        params = SamplingParams(temperature=5.0, seed=3, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
        (output,) = unlimited.generate(PROMPTS[0], params)
        params.logprobs = params.prompt_logprobs = 1
        (short,) = unlimited.generate(PROMPTS[0], params)
    for everything, few, token_ids in (
        (not_none(output.outputs[0].logprobs), not_none(short.outputs[0].logprobs), output.outputs[0].token_ids),
        (not_none(output.prompt_logprobs)[1:], not_none(short.prompt_logprobs)[1:], output.prompt_token_ids[1:]),  # type: ignore[index]
    ):  # fmt: skip
        for whole, part, token_id in zip(everything, few, token_ids, strict=True):
            assert whole is not None
            assert part is not None
            assert sorted(each.rank for each in whole.values()) == list(range(1, vocab_size + 1))
            by_rank = sorted(whole.values(), key=lambda each: each.rank)
            assert [each.logprob for each in by_rank] == sorted((e.logprob for e in by_rank), reverse=True)
            assert part[token_id].rank == whole[token_id].rank
            assert set(part) == {token_id} | {top for top, each in whole.items() if each.rank == 1}


def test_too_many_logprobs_are_refused(llm: LLM) -> None:
    for count in (21, -1):
        with pytest.raises(ValueError, match="must be at most 20, the server's max_logprobs"):
            llm.generate(PROMPTS, SamplingParams(logprobs=count))


def test_output_without_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=1, detokenize=False)
    without = llm.generate(PROMPTS[0], params)[0].outputs[0]
    params.detokenize = True
    output = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert (without.text, without.token_ids) == ("", output.token_ids)
    assert output.text
    assert all(each.decoded_token is None for entry in not_none(without.logprobs) for each in entry.values())


def test_metrics_are_in_order(llm: LLM) -> None:
    before = time.time()
    output = llm.generate(PROMPTS[0], SamplingParams(n=2, ignore_eos=True))[0]
    metrics = not_none(output.metrics)
    times = [
        before,
        metrics.arrival_time,
        metrics.scheduled_ts,
        metrics.first_token_ts,
        metrics.last_token_ts,
        time.time(),
    ]
    assert times == sorted(times)
    assert metrics.queued_ts == metrics.arrival_time
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time
    assert metrics.num_generation_tokens == 32
    assert output.num_cached_tokens >= 0


def test_chat_takes_templates_and_their_variables(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def prompt(**options: Any) -> str:
        (output,) = llm.chat(CONVERSATION, params, **options)
        return str(llm.get_tokenizer().decode(not_none(output.prompt_token_ids)))

    assert prompt() == "[user] What is a quire?\n[assistant] "
    assert prompt(add_generation_prompt=False) == "[user] What is a quire?\n"
    assert prompt(chat_template_kwargs={"shout": True}) == "[user] What is a quire?\nLOUD [assistant] "
    assert prompt(chat_template="{{ messages[0].content }}") == "What is a quire?"
    parts: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "What is a quire?"}]}]
    (from_parts,), (from_text,) = llm.chat(parts, params), llm.chat(CONVERSATION, params)
    assert from_parts.prompt_token_ids == from_text.prompt_token_ids
    several = llm.chat([CONVERSATION, parts], [params, params], use_tqdm=False)
    assert [output.outputs for output in several] == [from_text.outputs] * 2


def test_beam_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts: list[str | TextPrompt] = [TextPrompt(prompt=PROMPTS[0]), PROMPTS[1]]
    outputs = llm.beam_search(prompts, params)
    sampled = llm.generate(PROMPTS[:2], SamplingParams(beam_width=3, n=3, max_tokens=6))
    for output, expected in zip(outputs, sampled, strict=True):
        prompt = not_none(expected.prompt_token_ids)
        assert len(output.sequences) == 3
        for beam, completion in zip(output.sequences, expected.outputs, strict=True):
            ended = completion.finish_reason == "stop"
            assert beam.tokens == prompt + completion.token_ids[: -1 if ended else None]
            assert beam.cum_logprob == pytest.approx(not_none(completion.score) * len(completion.token_ids))
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
    with pytest.raises(ValueError, match="n: is 17, must be from 1 to 16"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=17, max_tokens=6))


def test_beam_search_ends_at_the_model_s_end_of_sequence(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {[*range(3, 380, 9)]}}}')
    with LLM(str(folder), device="cpu", num_kv_blocks=64) as llm:
        tokens = {
            keeps: llm.beam_search(
                PROMPTS[0],
                BeamSearchParams(beam_width=8, max_tokens=12, include_stop_str_in_output=keeps),
            )[0].sequences
            for keeps in (False, True)
        }
    assert {beam.finish_reason for beam in tokens[True]} >= {"stop"}
    for cut, kept in zip(tokens[False], tokens[True], strict=True):
        assert cut.tokens == (kept.tokens[:-1] if kept.finish_reason == "stop" else kept.tokens)


def test_adapters_that_cannot_be_used_are_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="lora_request: is of type dict, must be LoRARequest"):
        llm.generate(PROMPTS, lora_request={"lora_name": "sql"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_request: names an adapter, and the engine runs without"):
        llm.generate(PROMPTS, lora_request=LoRARequest("sql", 1, "/adapters/sql"))


def test_progress_bar_is_shown_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert capsys.readouterr().out == ""
    llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=True)
    assert "requests" in capsys.readouterr().out


def test_llm_from_engine_args(llm: LLM) -> None:
    args = EngineArgs(
        llm.config.model.path,
        device="cpu",
        dtype="float32",
        block_size=4,
        num_kv_blocks=256,
        max_num_seqs=8,
        max_num_batched_tokens=16,
    )
    for other in (LLM(**asdict(args)), LLM.from_engine_args(args)):
        with other:
            assert other.config == llm.config


def test_program_of_the_page_for_users_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.strip()
