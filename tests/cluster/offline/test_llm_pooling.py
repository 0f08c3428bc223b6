"""Embeddings and scores of LLM equal those computed with transformers, in chunks, batches and after preemption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooling_models import (
    EmbeddingReference,
    add_dense,
    as_classifier,
    as_embedder,
    as_reranker,
    change_json,
)
from reference import Reference, prompts_of

from quire import LLM, PoolingParams, SamplingParams
from quire.proto.errors import ConfigError, InvalidRequest, ModelLoadError

Options = dict[str, Any]
CPU: Options = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 64}
PROMPTS = prompts_of([1, 2, 9, 17, 40, 33], seed=3)
# Hidden states of float32 differ by less than 1e-5 from those of transformers.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def generator(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", seed=5)


@pytest.fixture(scope="module")
def reference(generator: Path) -> EmbeddingReference:
    return EmbeddingReference(generator)


@pytest.fixture(scope="module")
def embedder(generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_embedder(generator, tmp_path_factory.mktemp("embedder"))


def check(
    outputs: list[Any], reference: EmbeddingReference, mode: str = "lasttoken", **settings: Any
) -> None:
    for output in outputs:
        expected = reference.embed(output.prompt_token_ids, mode, **settings)
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "normalize"), [("lasttoken", True), ("mean_tokens", False), ("cls_token", True)]
)
def test_embeddings_of_each_pooling_equal_transformers(
    generator: Path, reference: EmbeddingReference, tmp_path: Path, mode: str, normalize: bool
) -> None:
    folder = as_embedder(generator, tmp_path, mode, normalize=normalize)
    with LLM(str(folder), max_num_batched_tokens=16, audit=True, **CPU) as llm:
        first = llm.embed(PROMPTS)
        again = llm.embed(PROMPTS)
    check(first, reference, mode, normalize=normalize)
    check(again, reference, mode, normalize=normalize)
    # Only the last token's hidden state can do without those before it.
    num_cached = sum(output.num_cached_tokens for output in again)
    assert (num_cached > 0) == (mode == "lasttoken")
    assert [output.usage.prompt_tokens for output in first] == list(map(len, PROMPTS))


def test_model_of_both_kinds_embeds_and_generates(generator: Path, reference: EmbeddingReference) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(generator), runner="both", max_num_batched_tokens=16, audit=True, **CPU) as llm:
        check(llm.embed(PROMPTS), reference)
        for output in llm.generate(PROMPTS[2:4], params):
            Reference(generator).check_greedy(output.prompt_token_ids or [], output.outputs[0].token_ids)


def test_embeddings_are_exact_after_preemptions(embedder: Path, reference: EmbeddingReference) -> None:
    """24 blocks hold two of the prompts; their chunks compete, and some give way."""
    prompts = prompts_of([45, 46, 47, 44], seed=8)
    options = CPU | {"num_kv_blocks": 26, "max_model_len": 64}
    with LLM(str(embedder), max_num_batched_tokens=8, audit=True, policy="priority", **options) as llm:
        check(llm.embed(prompts, priority=[3, 2, 1, 0]), reference)


def test_prompt_of_the_whole_context_is_embedded(embedder: Path, reference: EmbeddingReference) -> None:
    options = CPU | {"num_kv_blocks": 17, "max_model_len": 64}
    (longest,) = prompts_of([64], seed=1)
    with LLM(str(embedder), **options) as llm:
        check(llm.embed([longest]), reference)
        with pytest.raises(InvalidRequest, match="has 65 tokens, must have at most 64"):
            llm.embed([[*longest, 5]])
        (cut,) = llm.embed([[*longest, 5]], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        assert cut.prompt_token_ids == longest
        (short,) = llm.embed("The quick brown fox", pooling_params=PoolingParams(truncate_prompt_tokens=2))
        assert len(short.prompt_token_ids) == 2


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_embeddings_pass_dense_modules(
    generator: Path, reference: EmbeddingReference, tmp_path: Path, mode: str
) -> None:
    folder = as_embedder(generator, tmp_path, mode)
    layers = add_dense(folder)
    with LLM(str(folder), max_num_batched_tokens=16, **CPU) as llm:
        outputs = llm.embed(PROMPTS)
        (cut,) = llm.embed(PROMPTS[:1], pooling_params=PoolingParams(dimensions=48))
        np.testing.assert_allclose(cut.outputs.embedding, outputs[0].outputs.embedding, atol=TOLERANCE)
        with pytest.raises(InvalidRequest, match="dimensions: are 64, must be at most the model's 48"):
            llm.embed(PROMPTS[:1], pooling_params=PoolingParams(dimensions=64))
    for output in outputs:
        pooled = torch.from_numpy(reference.embed(output.prompt_token_ids, mode, normalize=False))
        expected = torch.nn.functional.normalize(layers(pooled), dim=0).detach().numpy()
        assert expected.shape == (48,)
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"in_features": 63},
            ModelLoadError,
            "in_features and out_features are 63 and 96, must be 64 and 1 to",
        ),
        ({"out_features": 97}, ModelLoadError, "in_features and out_features are 96 and 48, must be 97"),
        ({"activation_function": "evil.Code"}, ConfigError, "activation evil.Code is not supported"),
        ({"bias": False}, ModelLoadError, "tensors that the model does not use: linear.bias"),
        ({"module_output_name": "other"}, ConfigError, "module_output_name 'other' is not supported"),
    ],
)
def test_wrong_dense_module_is_refused(
    generator: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = as_embedder(generator, tmp_path)
    add_dense(folder)
    change_json(folder / "2_Dense" / "config.json", **change)
    with pytest.raises(error, match=words):
        LLM(str(folder), **CPU)


def test_dimensions_cut_and_normalize_embeddings(embedder: Path, reference: EmbeddingReference) -> None:
    params = [PoolingParams(dimensions=8), PoolingParams(), PoolingParams(dimensions=3, use_activation=False)]
    with LLM(str(embedder), **CPU) as llm:
        outputs = llm.embed(PROMPTS[3:], pooling_params=params)
        check(outputs[:1], reference, dimensions=8)
        check(outputs[1:2], reference)
        check(outputs[2:], reference, dimensions=3, normalize=False)
        with pytest.raises(InvalidRequest, match="dimensions: are 65, must be at most the model's 64"):
            llm.embed(PROMPTS[:1], pooling_params=PoolingParams(dimensions=65))


def test_matryoshka_dimensions_of_the_model_are_the_allowed_ones(generator: Path, tmp_path: Path) -> None:
    folder = as_embedder(generator, tmp_path, matryoshka_dimensions=[16, 32])
    with LLM(str(folder), **CPU) as llm:
        (output,) = llm.embed(PROMPTS[:1], pooling_params=PoolingParams(dimensions=16))
        assert output.outputs.hidden_size == 16
        with pytest.raises(InvalidRequest, match="are 17, must be one of 16, 32"):
            llm.embed(PROMPTS[:1], pooling_params=PoolingParams(dimensions=17))


def test_calls_that_a_model_is_not_for_are_refused(embedder: Path, generator: Path) -> None:
    with LLM(str(embedder), **CPU) as llm:
        with pytest.raises(InvalidRequest, match="embeds prompts, and does not generate text"):
            llm.generate("The")
        with pytest.raises(InvalidRequest, match="embeds prompts; classify is not for it"):
            llm.classify("The")
    with (
        LLM(str(generator), **CPU) as llm,
        pytest.raises(InvalidRequest, match="start it with --runner pooling"),
    ):
        llm.embed("The")


@pytest.mark.parametrize(("num_labels", "activation"), [(1, torch.sigmoid), (3, lambda x: x.softmax(-1))])
def test_classes_equal_transformers(
    generator: Path, tmp_path: Path, num_labels: int, activation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = as_classifier(generator, tmp_path, num_labels)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    raw = PoolingParams(use_activation=False)
    with LLM(str(folder), max_num_batched_tokens=16, **CPU) as llm:
        outputs, raw_outputs = llm.classify(PROMPTS), llm.classify(PROMPTS, pooling_params=raw)
        if num_labels == 1:
            (scored,) = llm.score("The quick brown fox", "jumps over")
            ids = llm.get_tokenizer()("The quick brown fox", "jumps over")["input_ids"]
            assert scored.prompt_token_ids == ids
        else:
            with pytest.raises(InvalidRequest, match="has 3 classes, must have 1 to score pairs"):
                llm.score("a", "b")
    for prompt, output, raw_output in zip(PROMPTS, outputs, raw_outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0]
        np.testing.assert_allclose(raw_output.outputs.probs, logits, atol=TOLERANCE)
        np.testing.assert_allclose(output.outputs.probs, activation(logits), atol=TOLERANCE)
        assert output.outputs.labels == tuple(f"label-{index}" for index in range(num_labels))


@pytest.mark.parametrize("false_id", [9, None])
@pytest.mark.parametrize("tied", [True, False])
def test_reranker_scores_by_the_logits_of_its_tokens(
    make_model: Callable[..., Path], tmp_path: Path, tied: bool, false_id: int | None
) -> None:
    source = make_model("qwen3", seed=5, tie_word_embeddings=tied)
    folder = as_reranker(source, tmp_path, 7, false_id)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'query' %}Q: {{ m.content }}{% endfor %}"
        "{% for m in messages if m.role == 'document' %} D: {{ m.content }}{% endfor %} yes?"
    )
    with LLM(str(folder), **CPU) as llm:
        outputs = llm.score("what", ["a fox", "a dog", "a very long document of many words"])
        tokenizer = llm.get_tokenizer()
    model = Reference(source).model
    for text, output in zip(("a fox", "a dog", "a very long document of many words"), outputs, strict=True):
        ids = tokenizer.encode(f"Q: what D: {text} yes?")
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        score = logits[7] - (0 if false_id is None else logits[false_id])
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(score)), abs=TOLERANCE)


def test_score_of_an_embedder_is_the_cosine(embedder: Path, reference: EmbeddingReference) -> None:
    with LLM(str(embedder), **CPU) as llm:
        one, other = llm.score("a fox", ["a dog", "two foxes"])
        (pair,) = llm.score(["a fox"], ["two foxes"])
        ids = [llm.get_tokenizer().encode(text) for text in ("a fox", "two foxes")]
        with pytest.raises(InvalidRequest, match="has 2 texts for 3, must have 1 or as many"):
            llm.score(["a", "b"], ["a", "b", "c"])
    fox, foxes = map(reference.embed, ids)
    assert other.outputs.score == pytest.approx(float(fox @ foxes), abs=TOLERANCE)
    assert pair.outputs.score == pytest.approx(other.outputs.score, abs=TOLERANCE)
    assert one.outputs.score != pytest.approx(other.outputs.score, abs=TOLERANCE)


@pytest.mark.parametrize(("field", "value"), [("is_causal", False), ("use_bidirectional_attention", True)])
def test_models_whose_attention_is_not_causal_are_refused(
    generator: Path, tmp_path: Path, field: str, value: bool
) -> None:
    folder = as_embedder(generator, tmp_path, normalize=True, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{field} is {str(value).lower()}"):
        LLM(str(folder), **CPU)


def test_poolings_that_are_not_supported_are_refused(generator: Path, tmp_path: Path) -> None:
    folder = as_embedder(generator, tmp_path, "max_tokens")
    with pytest.raises(ConfigError, match="pooling pooling_mode_max_tokens is not supported"):
        LLM(str(folder), **CPU)
