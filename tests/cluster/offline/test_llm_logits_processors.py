"""Custom logits processors of an installed package: the example's, in an LLM and in a server."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_server import threaded_server

from quire import LLM, Client, SamplingParams
from quire.proto.errors import ConfigError, InvalidRequest

EXAMPLE = Path(__file__).parents[3] / "examples" / "logits_processor"
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 64}
PROMPTS = [[5, 9, 11, 40, 7], [3, 8, 8, 8]]
EVEN = {"even_tokens": {"bias": 1000}}


def greedy(**others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **others)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example package, as an installation registers it."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    lines = ["[quire.logits_processors]"]
    lines += [
        f"{name} = {value}" for name, value in project["entry-points"]["quire.logits_processors"].items()
    ]
    lines += ["broken = even_tokens:Missing"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path[:0] = [str(folder), str(EXAMPLE)]
    yield
    sys.path.remove(str(folder))
    sys.path.remove(str(EXAMPLE))
    sys.modules.pop("even_tokens", None)


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="module")
def llm(installed: None, model: Path) -> Iterator[LLM]:
    with LLM(str(model), logits_processors="even_tokens", audit=True, **CPU) as llm:
        yield llm


def tokens_of(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, list(params))
    return [output.outputs[0].token_ids for output in outputs]


def test_requests_that_ask_are_processed_and_others_are_not(llm: LLM) -> None:
    plain = tokens_of(llm, greedy(), greedy())
    assert any(token % 2 for tokens in plain for token in tokens)
    even, other = tokens_of(llm, greedy(extra_args=EVEN), greedy())
    assert not any(token % 2 for token in even)
    assert other == plain[1]
    weak = greedy(extra_args={"even_tokens": {"bias": 0}})
    assert tokens_of(llm, weak, weak) == plain


def test_forms_and_bans_are_applied_after_custom_processors(llm: LLM) -> None:
    odd = tokens_of(llm, *[greedy(extra_args=EVEN, allowed_token_ids=[1, 3, 5])] * 2)
    assert {token for tokens in odd for token in tokens} <= {1, 3, 5}


def test_logprobs_are_those_of_the_models_own_logits(llm: LLM) -> None:
    (output, _) = llm.generate(PROMPTS, greedy(extra_args=EVEN, logprobs=0))
    completion = output.outputs[0]
    whole = [*PROMPTS[0], *completion.token_ids]
    (scored,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert completion.logprobs is not None
    assert scored.prompt_logprobs is not None
    for token, entry, again in zip(
        completion.token_ids, completion.logprobs, scored.prompt_logprobs[len(PROMPTS[0]) :], strict=True
    ):
        assert entry[token].logprob == pytest.approx((again or {})[token].logprob, abs=1e-4)


def test_wrong_arguments_end_the_request_and_the_engine_goes_on(llm: LLM) -> None:
    before = tokens_of(llm, greedy(), greedy())
    with pytest.raises(
        InvalidRequest,
        match=r"cannot go on: logits processor 'even_tokens' failed: .*must be like",
    ):
        llm.generate(PROMPTS[:1], greedy(extra_args={"even_tokens": "much"}))
    assert tokens_of(llm, greedy(), greedy()) == before
    with pytest.raises(InvalidRequest, match="has the processor 'odd', must be of even_tokens"):
        llm.generate(PROMPTS, greedy(extra_args={"odd": 1}))
    with pytest.raises(InvalidRequest, match="is not a value of JSON"):
        greedy(extra_args={"even_tokens": {"bias": float("nan")}})
    with pytest.raises(InvalidRequest, match="must be at most 65536 characters of JSON"):
        greedy(extra_args={"even_tokens": "x" * (1 << 17)})
    with pytest.raises(InvalidRequest, match="unset with beam_width"):
        SamplingParams(beam_width=2, extra_args=EVEN)


def test_drafts_change_no_token(installed: None, model: Path, llm: LLM) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    params = [greedy(extra_args=EVEN), greedy()]
    with LLM(str(model), logits_processors="even_tokens", speculative_config=config, **CPU) as drafting:
        assert tokens_of(drafting, *params) == tokens_of(llm, *params)


def test_forked_and_preempted_outputs_are_the_same(installed: None, model: Path, llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, extra_args=EVEN)

    def outputs(engine: LLM) -> list[list[int]]:
        return [own.token_ids for output in engine.generate(PROMPTS, params) for own in output.outputs]

    whole = outputs(llm)
    assert not any(token % 2 for tokens in whole for token in tokens)
    assert len(set(map(tuple, whole))) == 6
    with LLM(str(model), logits_processors="even_tokens", **CPU | {"num_kv_blocks": 20}) as small:
        assert outputs(small) == whole
        assert small._engine.scheduler.stats.num_preemptions > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "'missing', which no installed package offers"),
        ("broken", "'broken' cannot be loaded"),
        ("a,a", "has 'a' 2 times"),
        ("os:system", "must be a name"),
    ],
)
def test_processors_that_cannot_be_loaded_end_the_start(
    name: str, problem: str, installed: None, model: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(str(model), logits_processors=name, **CPU)


def test_server_takes_arguments_over_http_and_grpc(installed: None, model: Path) -> None:
    options = {"logits_processors": "even_tokens"}
    body = {
        "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "vllm_xargs": EVEN,
    }  # fmt: skip
    with (
        threaded_server(model, **options) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        Client(server.server.target) as client,
    ):
        tokens = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        assert not any(token % 2 for token in tokens)
        assert client.generate(PROMPTS[0], greedy(extra_args=EVEN)).outputs[0].token_ids == tokens
        wrong = http.post("/v1/completions", json=body | {"vllm_xargs": {"even_tokens": 3}})
        assert wrong.status_code == 400
        assert "logits processor 'even_tokens' failed" in wrong.json()["error"]["message"]
        with pytest.raises(InvalidRequest, match="has the processor 'odd'"):
            client.generate(PROMPTS[0], greedy(extra_args={"odd": 1}))
        server.wait_until_free()
