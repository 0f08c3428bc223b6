"""Tokens that travel to their experts: by DeepEP's calls, with experts that move meanwhile, and with failed ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_deep_ep
import pytest
import torch
from adapters import MLP, merge, write_adapter
from ranked_driver import RankedDriver
from reference import Reference, prompts_of

from quire.kernels.activation import GatedActivation
from quire.kernels.moe import ExpertWeights
from quire.proto.config import LoraConfig
from quire.proto.errors import ConfigError
from quire.proto.lora import LoraReference
from quire.worker.models.moe.moe import GroupedExperts
from quire.worker.rank.expert_balancer import ExpertBalancer

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def latents(make_model: Callable[..., Path]) -> tuple[Path, Reference]:
    folder = make_model("deepseek_v3", seed=7)
    return folder, Reference(folder)


def check(engine: Any, reference: Reference, seed: int = 1) -> None:
    """Compare the tokens of four sequences, prompts in chunks."""
    prompts = prompts_of([5, 23, 1, 9], seed=seed)
    for prompt, generated in zip(prompts, engine.greedy(prompts, MAX_TOKENS, chunk_len=16), strict=True):
        reference.check_greedy(prompt, generated)


@pytest.mark.parametrize(
    ("tp", "groups"), [(2, 2), (2, None), (4, 2)], ids=["own tokens", "slices", "slices of own tokens"]
)
@pytest.mark.parametrize("backend", ["deepep_high_throughput", "deepep_low_latency"])
def test_deepep_carries_the_tokens(
    backend: str,
    tp: int,
    groups: int | None,
    latents: tuple[Path, Reference],
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    folder, reference = latents
    engine = make_engine(
        folder, tp, enable_expert_parallel=True, all2all_backend=backend, max_num_batched_tokens=32,
        enable_dp_attention=groups is not None, dp_attention_size=groups,
    )  # fmt: skip
    check(engine, reference)
    is_recordable = engine.runners[0].memory.loaded.model.supports_graphs
    assert not is_recordable or backend == "deepep_low_latency"


def test_deepep_that_is_absent_or_does_not_fit_is_refused(
    latents: tuple[Path, Reference], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ConfigError, match=r"DeepEP cannot be imported.*set all2all_backend to all_to_all"):
        make_engine(latents[0], 2, **settings)
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    with pytest.raises(ConfigError, match="2 ranks do not divide"):
        make_engine(latents[0], 2, num_redundant_experts=1, **settings)


def test_tokens_travel_within_each_pipeline_stage(make_model: Any, make_engine: Any) -> None:
    folder = make_model("qwen3_moe", seed=7, num_hidden_layers=4)
    engine = make_engine(
        folder, 2, pp=2, enable_expert_parallel=True, all2all_backend="all_to_all", num_redundant_experts=1
    )  # fmt: skip
    check(engine, Reference(folder))


@pytest.mark.parametrize("backend", ["all_reduce", "all_to_all"])
def test_ranks_of_each_stage_attend_for_their_own_sequences(
    backend: str, latents: tuple[Path, Reference], make_engine: Any
) -> None:
    engine = make_engine(
        latents[0], 2, pp=2, enable_expert_parallel=True, all2all_backend=backend, enable_dp_attention=True
    )
    check(engine, latents[1])


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("backend", ["all_reduce", "all_to_all"])
def test_pairs_of_ranks_share_the_attention_of_their_sequences(
    backend: str, pp: int, latents: tuple[Path, Reference], make_engine: Any
) -> None:
    """Experts are on four ranks, the attention of a sequence on two; one sequence leaves a pair without tokens."""
    engine = make_engine(
        latents[0], 4, pp=pp, enable_expert_parallel=True, all2all_backend=backend, enable_dp_attention=True,
        dp_attention_size=2,
    )  # fmt: skip
    check(engine, latents[1])
    (prompt,) = prompts_of([1], seed=2)
    latents[1].check_greedy(prompt, *engine.greedy([prompt], MAX_TOKENS))


@pytest.mark.parametrize(
    ("kind", "tp", "groups"),
    [("deepseek_v3", 2, 2), ("deepseek_v3", 4, 2), ("deepseek_v3", 2, None), ("qwen3_moe", 4, None)],
)
def test_adapters_travel_with_their_tokens(
    kind: str, tp: int, groups: int | None, make_model: Any, make_engine: Any, tmp_path: Path
) -> None:
    """Of routers, experts and shared experts; steps have tokens of two adapters and of none."""
    folder = make_model(kind, seed=7)
    paths = [
        write_adapter(tmp_path / f"adapter{seed}", folder, modules, seed=seed)
        for seed, modules in enumerate([("o_proj", *MLP, "gate", "gate_up_proj"), (*MLP, "gate_up_proj")])
    ]
    references = [
        *(Reference(merge(tmp_path / f"merged{index}", folder, path)) for index, path in enumerate(paths)),
        Reference(folder),
    ]
    engine = make_engine(
        folder, tp, enable_expert_parallel=True, all2all_backend="all_to_all", max_num_batched_tokens=24,
        enable_dp_attention=groups is not None, dp_attention_size=groups, block_size=4, num_blocks=120,
        lora=LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2),
    )  # fmt: skip
    driver = RankedDriver(engine.config.with_num_blocks(120), engine.step)
    prompts = prompts_of([17, 22, 9, 13, 20, 8], seed=3)
    for handle, prompt in enumerate(prompts):
        adapter = handle % 3
        lora = LoraReference(str(adapter), str(paths[adapter])) if adapter < 2 else None
        driver.add(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, lora=lora)
    driver.run(depth=2)
    for handle, prompt in enumerate(prompts):
        references[handle % 3].check_greedy(prompt, driver.outputs[handle])
    assert references[0].generate(prompts[0], 6) != references[2].generate(prompts[0], 6)


@pytest.fixture(scope="module", params=[(2, 2), (4, None), (4, 2)], ids=str)
def moving(request: pytest.FixtureRequest, latents: tuple[Path, Reference], make_engine: Any) -> Any:
    tp, groups = request.param
    return make_engine(
        latents[0], tp, enable_expert_parallel=True, all2all_backend="all_to_all",
        enable_dp_attention=groups is not None, dp_attention_size=groups,
        enable_eplb=True, num_redundant_experts=3, eplb_step_interval=5,
    )  # fmt: skip


def balancers(engine: Any) -> list[ExpertBalancer]:
    return [runner.memory.balancer for runner in engine.runners]


def placements(engine: Any) -> list[list[tuple[int, ...]]]:
    return [[each.placement for each in own._replicas] for own in balancers(engine)]


def serve_until_moved(engine: Any, reference: Reference) -> None:
    """Serve until the experts that a thread of each rank reads have moved."""
    deadline = time.monotonic() + 60
    while not balancers(engine)[0].num_moves:
        check(engine, reference)
        assert time.monotonic() < deadline, "no expert has moved in 60 s"


def test_experts_move_while_sequences_run(moving: Any, latents: tuple[Path, Reference]) -> None:
    """The ranks take the same placement between the same steps, and the tokens stay."""
    first = placements(moving)[0]
    serve_until_moved(moving, latents[1])
    assert placements(moving)[0] != first
    assert all(own == placements(moving)[0] for own in placements(moving))
    check(moving, latents[1], seed=2)


def test_replaced_rank_takes_the_placement_of_the_others(
    moving: Any, latents: tuple[Path, Reference]
) -> None:
    """A rank that was loaded anew has the first placement, and reads what the others' says."""
    serve_until_moved(moving, latents[1])
    expected = placements(moving)[0]
    memory = moving.runners[1].memory
    with torch.inference_mode():
        memory._keep(memory.loader.load(memory._model))
    assert placements(moving)[1] != expected
    moving.on_all(lambda own: own.reset(has_new_ranks=False), moving.runners)
    assert all(own == expected for own in placements(moving))
    check(moving, latents[1], seed=3)


def test_experts_of_a_gpu_are_overwritten_where_recorded_steps_read_them() -> None:
    """In the memory that they had."""

    def experts(*seeds: int) -> GroupedExperts:
        weights = [
            [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            for shape in ((16, 12), (12, 8))
        ]
        gate_up, down = (ExpertWeights(torch.stack(each)) for each in weights)
        return GroupedExperts(gate_up, down, GatedActivation("silu", None), 3)

    own, x = experts(0, 1, 2), torch.randn(5, 12)
    factors, expert_ids = torch.rand(5, 2), torch.randint(3, (5, 2))
    address = own.down.codes.data_ptr()
    own.take_experts([2, 0], experts(7, 8))
    assert own.down.codes.data_ptr() == address
    expected = experts(8, 1, 7).forward(x, factors, expert_ids)
    assert torch.equal(own.forward(x, factors, expert_ids), expected)


def test_experts_that_cannot_be_read_stay(
    moving: Any, latents: tuple[Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    moving.on_all(lambda own: own.reset(has_new_ranks=False), moving.runners)  # forgets what is being read
    before = placements(moving)
    with torch.inference_mode():
        for own in balancers(moving):
            own._replicas[0].loads.zero_()
            own._replicas[0].loads[before[0][0][0]] = 1e6  # the expert of the first slot is the busiest
            monkeypatch.setattr(own, "_read", lambda orders: 1 / 0)
    check(moving, latents[1])
    check(moving, latents[1])
    assert placements(moving) == before
