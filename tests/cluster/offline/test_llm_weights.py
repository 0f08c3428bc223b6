"""Sleep, wake and updates of weights of an LLM; log-probabilities that a trainer can rely on."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Reference, prompts_of
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.cluster.text.requests.outputs import RequestOutput
from quire.proto.errors import InvalidRequest, ReplicaUnavailable

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "audit": True}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = prompts_of([9, 22, 5], seed=4)


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., Path]) -> tuple[Path, Path]:
    return make_model("llama", seed=1), make_model("llama", seed=2)


def check(llm: LLM, folder: Path, version: str) -> None:
    reference = Reference(folder)
    for output in llm.generate(PROMPTS, GREEDY):
        reference.check_greedy(output.prompt_token_ids or [], output.outputs[0].token_ids)
        assert output.outputs[0].weights_version == version
        assert output.num_cached_tokens == 0


def test_updated_weights_generate_their_own_tokens_and_find_no_old_prefix(
    folders: tuple[Path, Path],
) -> None:
    first, second = folders
    with LLM(str(first), num_kv_blocks=64, **CPU) as llm:
        check(llm, first, "")
        llm.update_weights(second, version="step-1")
        check(llm, second, "step-1")
        llm.update_weights(tensors=load_file(first / "model.safetensors"), version="step-2")
        check(llm, first, "step-2")


def test_wrong_weights_are_refused_and_change_nothing(
    folders: tuple[Path, Path], make_model: Callable[..., Path]
) -> None:
    first, _ = folders
    tensors = load_file(first / "model.safetensors")
    with LLM(str(first), num_kv_blocks=64, **CPU) as llm:
        with pytest.raises(InvalidRequest, match="1 tensors are missing or more than the model has: lm_head"):
            llm.update_weights(
                tensors={name: each for name, each in tensors.items() if "lm_head" not in name}, version="x"
            )
        other = make_model("llama", seed=1, intermediate_size=96)
        with pytest.raises(InvalidRequest, match=r"\[64, 96\], must be torch.float32 \[64, 128\]"):
            llm.update_weights(other, version="x")
        with pytest.raises(InvalidRequest, match="missing"):
            llm.update_weights(first / "missing", version="x")
        with pytest.raises(InvalidRequest, match="version: is empty"):
            llm.update_weights(first, version="")
        with pytest.raises(InvalidRequest, match="path: must be given, or tensors"):
            llm.update_weights(first, tensors=tensors, version="x")
        with pytest.raises(InvalidRequest, match="tensors: are empty"):
            llm.update_weights(tensors={}, version="x")
        check(llm, first, "")


def test_sleeping_engine_refuses_requests_and_wakes_with_its_weights(folders: tuple[Path, Path]) -> None:
    first, second = folders
    with LLM(str(first), num_kv_blocks=64, **CPU) as llm:
        llm.update_weights(second, version="v")
        llm.sleep()
        llm.sleep()
        with pytest.raises(ReplicaUnavailable, match="the engine sleeps; wake it up first"):
            llm.generate(PROMPTS, GREEDY)
        llm.wake_up()
        check(llm, second, "v")
        llm.sleep(level=2)
        with pytest.raises(InvalidRequest, match="update_weights must name others first"):
            llm.wake_up()
        llm.update_weights(first, version="w")
        llm.wake_up()
        check(llm, first, "w")
        with pytest.raises(InvalidRequest, match="level: is 3"):
            llm.sleep(level=3)


def test_engine_wakes_in_parts(folders: tuple[Path, Path]) -> None:
    first, second = folders
    with LLM(str(first), num_kv_blocks=64, **CPU) as llm:
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.update_weights(tensors=load_file(second / "model.safetensors"), version="v")
        with pytest.raises(ReplicaUnavailable, match="the engine sleeps; wake it up first"):
            llm.generate(PROMPTS, GREEDY)
        with pytest.raises(InvalidRequest, match="tags: have 'kv', must be of weights, kv_cache"):
            llm.wake_up(tags=["kv"])
        llm.wake_up(tags=["kv_cache"])
        check(llm, second, "v")


def test_sleep_frees_the_memory_of_the_kv_cache(folders: tuple[Path, Path]) -> None:
    kv_bytes = 256 << 20
    with LLM(str(folders[0]), kv_cache_memory=kv_bytes, **CPU) as llm:
        awake = resident_bytes()
        llm.sleep()
        assert awake - resident_bytes() > kv_bytes // 2
        llm.wake_up()
        assert awake - resident_bytes() < kv_bytes // 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def logprobs_of(output: RequestOutput) -> list[float]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [entry[token_id].logprob for token_id, entry in pairs]


def test_sampled_logprobs_equal_those_of_a_later_forward_pass(folders: tuple[Path, Path]) -> None:
    """Of the engine itself, which scores prompt and output as one prompt, and of transformers."""
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=0)
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(folders[0]), num_kv_blocks=64, **CPU) as llm:
        outputs = llm.generate(PROMPTS, sampling)
        whole = [[*(each.prompt_token_ids or []), *each.outputs[0].token_ids] for each in outputs]
        scored = llm.generate(whole, scoring)
    model = Reference(folders[0]).model
    for output, tokens, again in zip(outputs, whole, scored, strict=True):
        sampled, start = logprobs_of(output), len(output.prompt_token_ids or [])
        assert again.prompt_logprobs is not None
        entries = again.prompt_logprobs[start:]
        later = [(entry or {})[token].logprob for entry, token in zip(entries, tokens[start:], strict=True)]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].log_softmax(-1)
        reference = logits[range(len(sampled)), tokens[start:]].tolist()
        assert sampled == pytest.approx(later, abs=1e-4)
        assert sampled == pytest.approx(reference, abs=1e-4)


def test_tied_weights_of_a_trainer_are_taken(make_model: Callable[..., Path]) -> None:
    """The state of a module has the output layer beside the embedding, in the same memory; the files do not."""
    first, second = (make_model("llama", seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    module = Reference(second).model
    with LLM(str(first), num_kv_blocks=64, **CPU) as llm:
        check(llm, first, "")
        llm.update_weights(tensors=module.state_dict(), version="step-1")
        check(llm, second, "step-1")
