"""LLM with adapters: outputs equal those of the merged models, whatever the scheduler does to a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from adapters import ATTENTION, merge, write_adapter
from narrowing import not_none
from reference import Reference, prompts_of

from quire import LLM, LoRARequest, SamplingParams
from quire.cluster.offline.beams import BeamSearchParams
from quire.cluster.offline.in_process import InProcessEngine
from quire.cluster.text.requests.outputs import RequestOutput
from quire.proto.errors import InvalidRequest, LoraLoadError, RankFailed
from quire.proto.step import StepPlan
from quire.worker.rank.runner import ModelRunner
from quire.worker.rank.step_executor import LaunchedStep

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SETTINGS: list[dict[str, Any]] = [
    {"rank": 4, "seed": 1},
    {"rank": 8, "modules": ATTENTION, "seed": 2},
    {"rank": 2, "modules": ("v_proj", "down_proj"), "use_rslora": True, "seed": 3},
]


@dataclass(frozen=True)
class Adapted:
    """A model, its adapters, and each merged model.

    Attributes:
        requests: an adapter's request by index; the last is None, for the model alone.
        references: of the merged models, in the order of `requests`.
    """

    model: Path
    merged: list[Path]
    requests: list[LoRARequest | None]
    references: list[Reference]


@pytest.fixture(scope="module")
def adapted(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    model, root = make_model("llama", seed=7), tmp_path_factory.mktemp("lora")
    paths = [
        write_adapter(root / f"adapter{index}", model, **settings) for index, settings in enumerate(SETTINGS)
    ]
    merged = [merge(root / f"merged{index}", model, path) for index, path in enumerate(paths)]
    requests = [LoRARequest(path.name, 1, str(path)) for path in paths]
    return Adapted(model, merged, [*requests, None], [*map(Reference, merged), Reference(model)])


def open_llm(model: Path, **options: Any) -> LLM:
    defaults = {"enable_lora": True, "max_loras": 2, "block_size": 4, "num_kv_blocks": 256, "audit": True}
    return LLM(str(model), device="cpu", dtype="float32", **{**defaults, **options})


@pytest.fixture(scope="module")
def llm(adapted: Adapted) -> Iterator[LLM]:
    with open_llm(adapted.model, max_num_batched_tokens=16) as opened:
        yield opened


def lora_of(llm: LLM) -> Any:
    assert isinstance(llm._engine, InProcessEngine)
    return llm._engine.scheduler.lora


def check(results: list[RequestOutput], adapted: Adapted, indices: list[int]) -> None:
    for result, index in zip(results, indices, strict=True):
        tokens = result.outputs[0].token_ids
        adapted.references[index].check_greedy(not_none(result.prompt_token_ids), tokens)


def test_more_adapters_than_slots_equal_merged_models(llm: LLM, adapted: Adapted) -> None:
    """In chunks of 16 tokens; three adapters take turns in two slots and two places in memory."""
    indices = [0, 1, 2, 3] * 3
    results = llm.generate(
        prompts_of([21, 5, 40] * 4, seed=1), GREEDY, lora_request=[adapted.requests[i] for i in indices]
    )
    check(results, adapted, indices)
    assert lora_of(llm).num_in_memory == 2


def test_prefix_is_shared_within_an_adapter_only(llm: LLM, adapted: Adapted) -> None:
    (prompt,) = prompts_of([32], seed=2)
    for index, num_cached_tokens in ((0, 0), (3, 0), (1, 0), (0, 31)):
        results = llm.generate([prompt], GREEDY, lora_request=adapted.requests[index])
        check(results, adapted, [index])
        assert results[0].num_cached_tokens == num_cached_tokens
    renamed = LoRARequest("adapter0", 2, not_none(adapted.requests[0]).lora_path)
    assert llm.generate([prompt], GREEDY, lora_request=renamed)[0].num_cached_tokens == 0


def test_preempted_sequences_equal_merged_models(adapted: Adapted) -> None:
    """All adapters are in memory at first, so that the six sequences run together, however long a load takes."""
    indices = [0, 1, 2, 0, 3, 2]
    options = {"max_loras": 3, "num_kv_blocks": 22, "num_host_kv_blocks": 12, "prefix_caching": False}
    with open_llm(adapted.model, **options) as llm:
        for request in adapted.requests[:3]:
            llm.generate(prompts_of([5], seed=1), SamplingParams(max_tokens=1), lora_request=request)
        requests = [adapted.requests[index] for index in indices]
        results = llm.generate(prompts_of([20] * 6, seed=3), GREEDY, lora_request=requests)
        check(results, adapted, indices)
        assert isinstance(llm._engine, InProcessEngine)
        assert llm._engine.scheduler.stats.num_preemptions > 0


def test_sampled_outputs_and_beams_equal_those_of_the_merged_model(llm: LLM, adapted: Adapted) -> None:
    (prompt,) = prompts_of([18], seed=4)
    sampled = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    lora = adapted.requests[0]
    with open_llm(adapted.merged[0], enable_lora=False) as merged:
        expected = merged.generate([prompt], sampled)[0]
        found = llm.generate([prompt], sampled, lora_request=lora)[0]
        assert [each.token_ids for each in found.outputs] == [each.token_ids for each in expected.outputs]
        ours, theirs = (
            each.sequences
            for each in (
                *llm.beam_search([prompt], beams, lora_request=lora),
                *merged.beam_search([prompt], beams),
            )
        )
    assert [beam.tokens for beam in ours] == [beam.tokens for beam in theirs]


def test_speculative_decoding_with_adapters_equals_merged_models(adapted: Adapted) -> None:
    """Drafts come from the text, and are verified by the row's own adapter."""
    indices = [0, 1, 3]
    prompts = [2 * prompt for prompt in prompts_of([12] * 3, seed=6)]
    with open_llm(adapted.model, speculative_config={"method": "ngram"}) as llm:
        requests = [adapted.requests[index] for index in indices]
        check(llm.generate(prompts, GREEDY, lora_request=requests), adapted, indices)


def test_failed_load_fails_its_call_only(llm: LLM, adapted: Adapted, tmp_path: Path) -> None:
    missing = LoRARequest("gone", 1, str(tmp_path / "gone"))
    with pytest.raises(LoraLoadError, match=r"adapter 'gone' in .* cannot be loaded: .*no such directory"):
        llm.generate(prompts_of([5], seed=1), GREEDY, lora_request=missing)
    too_large = write_adapter(tmp_path / "large", adapted.model, rank=17)
    with pytest.raises(LoraLoadError, match="r is 17, must be from 1 to 16; see max_lora_rank"):
        llm.generate(prompts_of([5], seed=1), GREEDY, lora_request=LoRARequest("large", 1, str(too_large)))
    check(llm.generate(prompts_of([5], seed=1), GREEDY, lora_request=adapted.requests[2]), adapted, [2])
    assert {each.name for each in lora_of(llm).references} <= {"adapter0", "adapter1", "adapter2"}


def test_outputs_after_failed_steps_equal_merged_models(
    llm: LLM, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset rank has forgotten its adapters, and reads them anew."""
    launch, num_computing = ModelRunner.launch, 0

    def fail_sometimes(runner: ModelRunner, plan: StepPlan) -> LaunchedStep:
        nonlocal num_computing
        num_computing += bool(plan.chunk_rows.size)
        if num_computing in (3, 12) and plan.chunk_rows.size:
            num_computing += 1
            raise RankFailed(0, "RuntimeError: on command", plan.step_id, is_step_error=True)
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", fail_sometimes)
    indices = [0, 1, 3]
    requests = [adapted.requests[index] for index in indices]
    check(llm.generate(prompts_of([40] * 3, seed=7), GREEDY, lora_request=requests), adapted, indices)
    assert num_computing > 12


def test_adapters_are_refused_unless_enabled(adapted: Adapted) -> None:
    with (
        open_llm(adapted.model, enable_lora=False, max_loras=1) as llm,
        pytest.raises(InvalidRequest, match="the engine runs without enable_lora"),
    ):
        llm.generate("x", GREEDY, lora_request=adapted.requests[0])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("", 1, "/x"), "lora_name: has 0 characters"),
        (("x", 0, "/x"), "lora_int_id: is 0, must be at least 1"),
        (("x", True, "/x"), "lora_int_id: is True, must be a whole number"),
        (("x", 1), "lora_path: has 0 characters"),
    ],
)
def test_lora_request_names_the_wrong_field(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        LoRARequest(*arguments)
