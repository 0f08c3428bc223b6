"""A request's tokens and log-probabilities are the same bits alone and among 17 others, with and without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import ATTENTION, MLP, VOCABULARY, write_adapter
from known_outputs import KnownOutputs
from model_kinds import KINDS, model_type_of
from published_checkpoints import CHECKPOINTS, write_published
from quick_cases import diagonal, slow_except
from ranked_driver import RankedDriver
from state_kinds import STATE_KINDS

from benchmarks.draft_lengths import fixed_lengths
from quire.cluster.config.model_config import describe_model
from quire.kernels.native.library import is_available
from quire.proto.config import LoraConfig, PoolingConfig, SpeculativeConfig
from quire.proto.lora import LoraReference
from quire.proto.model.registry import FAMILIES, check_supported
from quire.proto.model.spec import DecoderSpec
from quire.proto.model.streams import Streams
from quire.proto.pooling import PoolingParams
from quire.worker.rank import loaded_model

DTYPES = ["float32", "bfloat16", "float16"]
# Kinds that run in every instruction set: dense, with a window, experts, latents, and latents with an indexer.
OWN_OPS = ["llama-two-kv-heads", "mistral-window", "qwen3_moe", "deepseek_v3", "deepseek_v32"]
# Kinds of which each has ops that others lack, and formats, in one dtype each. The others are slow.
QUICK = list(zip(("mixtral", "gpt_oss", "gemma2", "gemma3n_text", "gemma4_text-experts"), cycle(DTYPES)))
QUICK_FORMATS = list(
    zip(("llama-fp8-frozen", "qwen3_moe-fp8", "qwen3_moe-gptq", "qwen3_moe-nvfp4"), cycle(DTYPES[::-1]))
)
# Of OWN_OPS and DTYPES, those that two ranks compute in `make test`.
QUICK_ON_TWO_RANKS = [
    ("llama-two-kv-heads", "float16"),
    ("qwen3_moe", "bfloat16"),
    ("deepseek_v32", "bfloat16"),
]
NUM_BLOCKS, NUM_SPECULATIVE_TOKENS = 400, 4
SPECULATIVE = SpeculativeConfig("ngram", NUM_SPECULATIVE_TOKENS)
PROMPT_LENS = [1, 37, 70]
MAX_TOKENS = 20
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "logprobs": 2}

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")


def prompt(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, 380, length).tolist()
    return tokens


# Handle |-> prompt and settings.
REQUESTS = {
    handle: (prompt(handle, length), settings)
    for handle, (length, settings) in enumerate(
        (length, settings) for length in PROMPT_LENS for settings in (GREEDY, SEEDED)
    )
}
NEIGHBORS = {100 + i: (prompt(100 + i, 3 + 5 * i), SEEDED | {"seed": i}) for i in range(17)}


@pytest.fixture(autouse=True)
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loaded_model, "NgramProposer", KnownOutputs)
    with fixed_lengths(100):
        yield


def run(
    engine: Any, requests: dict[int, Any], *, drafts: bool = False, num_blocks: int = NUM_BLOCKS
) -> RankedDriver:
    """Run requests together; their prompts are computed in chunks of what the budget of a step leaves."""
    config = replace(engine.config.with_num_blocks(num_blocks), speculative=SPECULATIVE if drafts else None)
    driver = RankedDriver(config, engine.step)
    for handle, (own, settings) in requests.items():
        driver.add(handle, own, max_tokens=MAX_TOKENS, ignore_eos=True, **settings)
    driver.run(2)
    driver.empty_ranks()
    return driver


def assert_same(found: RankedDriver, expected: RankedDriver) -> None:
    """Assert that tokens and log-probabilities of the requests of `expected` have the same bits."""
    for handle, output in expected.outputs.items():
        assert found.outputs[handle] == output, handle
        assert found.logprobs[handle] == expected.logprobs[handle], handle


def check_batch_invariance(engine: Any) -> None:
    alone = [run(engine, {handle: request}) for handle, request in REQUESTS.items()]
    together = run(engine, REQUESTS | NEIGHBORS)
    for single in alone:
        assert_same(together, single)
    texts = {handle: own for handle, (own, _) in (REQUESTS | NEIGHBORS).items()}
    KnownOutputs.known = [texts[handle] + output for handle, output in together.outputs.items()]
    if engine.config.speculative is None:
        return
    few = {handle: REQUESTS[handle] for handle in (0, 1, 2)}
    drafted = run(engine, few, drafts=True)
    assert sum(drafted.scheduler.stats.num_accepted) > 0
    for single in alone[:3]:
        assert_same(drafted, single)


def make_wide_engine(make_engine: Any, folder: Path, dtype: str, tp: int = 1, **settings: Any) -> Any:
    return make_engine(
        folder,
        tp,
        NUM_BLOCKS,
        dtype=dtype,
        block_size=8,
        max_num_seqs=24,
        max_num_batched_tokens=48,
        speculative=SPECULATIVE,
        **settings,
    )


@pytest.mark.parametrize(("kind", "dtype"), diagonal(OWN_OPS, DTYPES))
def test_neighbors_and_drafts_do_not_change_bits(
    kind: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    check_batch_invariance(make_wide_engine(make_engine, folder, dtype))


@pytest.mark.parametrize(("kind", "dtype"), slow_except(QUICK_ON_TWO_RANKS, product(OWN_OPS, DTYPES)))
def test_neighbors_and_drafts_do_not_change_bits_of_two_ranks(
    kind: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    check_batch_invariance(make_wide_engine(make_engine, folder, dtype, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("qwen3_moe", "enable_expert_parallel"),
        ("deepseek_v3", "enable_dp_attention"),
        ("deepseek_v32", "enable_dp_attention"),
    ],
)
def test_neighbors_and_drafts_do_not_change_bits_of_other_divisions(
    kind: str, setting: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    check_batch_invariance(make_wide_engine(make_engine, folder, dtype, 2, **{setting: True}))


@pytest.mark.parametrize(
    ("kind", "dtype"), slow_except(QUICK, product((kind for kind in KINDS if kind not in OWN_OPS), DTYPES))
)
def test_neighbors_and_drafts_do_not_change_bits_of_other_kinds(
    kind: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    model = describe_model(folder, kind)
    if model.architecture not in FAMILIES:
        pytest.skip("modules of transformers compute its layers")
    spec = check_supported(model, 1)
    if isinstance(spec, DecoderSpec) and isinstance(spec.variant, Streams):
        pytest.skip("its residual has several streams; see Equal bits in docs/limits.md")
    check_batch_invariance(make_wide_engine(make_engine, folder, dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except(
        QUICK_FORMATS,
        # PyTorch's ops attend to entries
        product((name for name, own in CHECKPOINTS.items() if own.kind not in STATE_KINDS), DTYPES),
    ),
)
def test_neighbors_and_drafts_do_not_change_bits_of_quantized_weights(
    name: str, dtype: str, make_model: Callable[..., Path], make_engine: Any, tmp_path: Path
) -> None:
    published = CHECKPOINTS[name]
    folder, _ = write_published(
        make_model(published.kind, seed=3, **published.overrides), tmp_path, published
    )
    check_batch_invariance(make_wide_engine(make_engine, folder, dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_except(
        [("llama-two-kv-heads", "float32"), ("qwen3_moe", "bfloat16")],
        product(["llama-two-kv-heads", "qwen3_moe"], DTYPES),
    ),
)
def test_adapters_of_neighbors_do_not_change_bits(
    kind: str, dtype: str, make_model: Callable[..., Path], make_engine: Any, tmp_path: Path
) -> None:
    """Requests with each adapter and without one; a step without any adapter runs other ops."""
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    paths = [
        write_adapter(tmp_path / "all", folder, (*ATTENTION, *MLP, *VOCABULARY), rank=4, seed=1),
        write_adapter(tmp_path / "some", folder, ("v_proj", "up_proj", "down_proj"), rank=7, seed=2),
    ]
    adapters = [*(LoraReference(path.name, str(path)) for path in paths), None]
    lora = LoraConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=2)
    engine = make_wide_engine(make_engine, folder, dtype, lora=lora)
    config = replace(engine.config, speculative=None).with_num_blocks(NUM_BLOCKS)
    config = replace(config, cache=replace(config.cache, prefix_caching=False))
    driver = RankedDriver(config, engine.step)
    requests = {
        10 * handle + index: (own, settings | {"lora": lora})
        for handle, (own, settings) in (REQUESTS | NEIGHBORS).items()
        for index, lora in enumerate(adapters)
        if handle in (0, 3, 4) or (handle > 100 and handle % 3 == index)
    }

    def add(handle: int, first: int) -> None:
        own, settings = requests[handle]
        driver.add(first + handle, own, max_tokens=MAX_TOKENS, ignore_eos=True, **settings)

    alone, together = 10_000, 20_000
    singles = [handle for handle in requests if handle < 100]
    for handle in singles:
        add(handle, alone)
        driver.run(2)
    for handle in requests:
        add(handle, together)
    driver.run(2)
    for handle in singles:
        assert driver.outputs[together + handle] == driver.outputs[alone + handle], handle
        assert driver.logprobs[together + handle] == driver.logprobs[alone + handle], handle
    assert len({tuple(driver.outputs[alone + 40 + index]) for index in range(3)}) == 3


@pytest.mark.parametrize(("pooling_type", "dtype"), diagonal(["mean", "last"], DTYPES))
def test_neighbors_do_not_change_bits_of_scored_and_pooled_prompts(
    pooling_type: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model("llama", seed=7, **KINDS["llama-two-kv-heads"])
    pooling = PoolingConfig(pooling_type, 64, activation="normalize")
    engine = make_wide_engine(make_engine, folder, dtype, pooling=pooling)
    config = replace(engine.config, speculative=None).with_num_blocks(NUM_BLOCKS)
    driver = RankedDriver(replace(config, cache=replace(config.cache, prefix_caching=False)), engine.step)

    def add(handle: int, own: list[int]) -> None:
        driver.add(handle, own, pooling=PoolingParams())
        driver.add(handle + 1, own, max_tokens=1, prompt_logprobs=2, **GREEDY)

    prompts = [own for own, _ in (REQUESTS | NEIGHBORS).values()]
    for index, own in enumerate(prompts):
        add(10 * index, own)
        driver.run(2)
    for index, own in enumerate(prompts):
        add(1000 + 10 * index, own)
    driver.run(2)
    for index in range(len(prompts)):
        assert driver.vectors[10 * index] == driver.vectors[1000 + 10 * index], index
        assert driver.scores.get(10 * index + 1) == driver.scores.get(1000 + 10 * index + 1), index
    assert any(driver.scores.values())


@pytest.mark.parametrize(
    ("settings", "dtype"),
    diagonal(
        [{"quantization": "int8"}, {"quantization": "fp8"}, {"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "int8"}],
        ["bfloat16", "float16"],
    ),
    ids=str,
)
def test_neighbors_and_drafts_do_not_change_bits_of_numbers_quantized_here(
    settings: dict[str, Any], dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    check_batch_invariance(make_wide_engine(make_engine, make_model("qwen3", seed=7), dtype, **settings))


@pytest.mark.parametrize(("kind", "dtype"), diagonal(OWN_OPS, DTYPES, shift=1))
def test_preemptions_and_moves_do_not_change_bits(
    kind: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    engine = make_wide_engine(make_engine, folder, dtype)
    requests = {handle: REQUESTS[handle] for handle in (2, 3, 4, 5)}
    plenty = run(engine, requests)
    most = plenty.scheduler.stats.peak_used_blocks
    scarce = [run(engine, requests, num_blocks=most * share // 10) for share in (9, 8, 7)]
    for driver in scarce:
        assert_same(driver, plenty)
    if kind == "llama-two-kv-heads":  # others need few blocks
        assert sum(driver.scheduler.stats.num_preemptions for driver in scarce) > 0
    moved = RankedDriver(replace(engine.config, speculative=None).with_num_blocks(NUM_BLOCKS), engine.step)
    for handle, (own, settings) in requests.items():
        moved.add(
            handle,
            own,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            generated=plenty.outputs[handle][:11],
            **settings,
        )
    moved.run(2)
    moved.empty_ranks()
    for handle in requests:
        assert moved.outputs[handle] == plenty.outputs[handle][11:]
        assert moved.logprobs[handle] == plenty.logprobs[handle][11:]


@pytest.mark.parametrize(("kind", "dtype"), diagonal(OWN_OPS, DTYPES, shift=2))
def test_cached_prefixes_do_not_change_bits(
    kind: str, dtype: str, make_model: Callable[..., Path], make_engine: Any
) -> None:
    folder = make_model(model_type_of(kind), seed=7, **KINDS[kind])
    engine = make_wide_engine(make_engine, folder, dtype)
    first = run(engine, REQUESTS)
    driver = RankedDriver(replace(engine.config, speculative=None).with_num_blocks(NUM_BLOCKS), engine.step)
    for length in (1, 8, 30):
        for handle, (own, settings) in REQUESTS.items():
            driver.add(1000 * length + handle, own[:length], max_tokens=1, **settings)
        driver.run(2)
    for handle, (own, settings) in REQUESTS.items():
        driver.add(handle, own, max_tokens=MAX_TOKENS, ignore_eos=True, **settings)
    driver.run(2)
    driver.empty_ranks()
    assert driver.scheduler.blocks.num_hit_tokens > 0
    assert_same(driver, first)
