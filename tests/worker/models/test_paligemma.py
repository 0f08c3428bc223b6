"""PaliGemma, whose prompts attend to all of their tokens: each is computed in one step, and cached as a whole."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from ranked_driver import RankedDriver
from vision_kinds import VISION_KINDS
from vision_models import (
    IMAGE_TOKEN,
    MAX_TEXT_TOKEN,
    VIDEO_TOKEN,
    VisionPrompt,
    VisionReference,
    make_prompt,
    random_image,
    save_model,
)

from quire.proto.config import EngineConfig

KIND = VISION_KINDS["paligemma"]
NUM_TOKENS = 6
SAMPLING: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "logit_bias": {IMAGE_TOKEN: -100.0, VIDEO_TOKEN: -100.0},
}
BLOCK_SIZE = 4


class Model:
    """A small model, and prompts for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random(1)
        self._processor = save_model(KIND, folder, 1)
        self.reference = VisionReference(folder)
        self._images = [random_image(self.rng, 30, 50) for _ in range(2)]

    def prompt(self, *chosen: int, text: int = 9) -> VisionPrompt:
        images = [self._images[each] for each in chosen]
        lens = [*[0] * len(images), text]
        return make_prompt(KIND, self._processor, self.rng, images, lens, self.reference)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("paligemma"))


def engine_of(model: Model, make_engine: Any, **settings: Any) -> Any:
    return make_engine(model.folder, max_model_len=1024, num_blocks=256, block_size=BLOCK_SIZE, **settings)


def driver_of(engine: Any, num_blocks: int = 192, config: EngineConfig | None = None) -> RankedDriver:
    config = engine.config if config is None else config
    return RankedDriver(config.with_num_blocks(num_blocks), engine.step, engine.take_media)


def add(driver: RankedDriver, handle: int, prompt: VisionPrompt, **settings: Any) -> None:
    driver.images.update(prompt.tensors)
    rejected = driver.add(handle, prompt.token_ids, media=prompt.media, **SAMPLING | settings)
    assert rejected is None, rejected


def test_equal_prompts_share_their_blocks_and_others_none(model: Model, make_engine: Any) -> None:
    """One prompt leaves a token after its blocks, which is computed alone; other ends change all that is before."""
    driver = driver_of(engine_of(model, make_engine), num_blocks=250)
    for text in range(5, 5 + BLOCK_SIZE):
        prompt = model.prompt(0, text=text)
        others = [model.prompt(0, text=text) for _ in range(2)]
        grown = replace(prompt, token_ids=[*prompt.token_ids, 5])
        num_cached = []
        for index, each in enumerate((prompt, *others, grown, prompt)):
            handle = 10 * text + index
            add(driver, handle, each)
            driver.run()
            model.reference.check_greedy(each, driver.outputs[handle])
            num_cached.append(driver.finishes[handle].num_cached_tokens)
        most = (len(prompt.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert num_cached[:4] == [0] * 4
        assert num_cached[4] >= most
    driver.empty_ranks()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_prompts_are_computed_with_their_tokens(
    prefix_caching: bool, model: Model, make_engine: Any
) -> None:
    """The prompt attends to all of itself, and generated tokens of the same chunk to those before them."""
    prompts = [model.prompt(0), model.prompt(), model.prompt(1, text=3), model.prompt(0, text=12)]
    longest, num_tokens = max(len(prompt.token_ids) for prompt in prompts), 24
    engine = engine_of(model, make_engine, max_num_batched_tokens=longest + 8, prefix_caching=prefix_caching)
    least = next(
        n for n in count(2) if engine.config.with_num_blocks(n).max_servable_tokens >= longest + num_tokens
    )
    driver = driver_of(engine, num_blocks=least + 5)
    for handle, prompt in enumerate(prompts):
        add(driver, handle, prompt, max_tokens=num_tokens)
    driver.run(depth=2)
    driver.empty_ranks()
    assert driver.scheduler.stats.num_preemptions
    for handle, prompt in enumerate(prompts):
        assert len(driver.outputs[handle]) == num_tokens
        model.reference.check_greedy(prompt, driver.outputs[handle])


def test_sequence_continues_at_another_replica(model: Model, make_engine: Any) -> None:
    prompt, engine = model.prompt(0), engine_of(model, make_engine)
    first = driver_of(engine)
    add(first, 0, prompt)
    first.run()
    first.empty_ranks()
    expected = first.outputs[0]
    second = driver_of(engine)
    add(second, 0, prompt, generated=expected[:3])
    second.run()
    second.empty_ranks()
    assert second.outputs[0] == expected[3:]


def test_long_prompt_waits_for_decodes_and_is_not_overtaken(model: Model, make_engine: Any) -> None:
    """It needs all tokens of a step; texts that come after it would take some of each."""
    prompt = model.prompt(0, 1)
    engine = engine_of(model, make_engine, max_num_batched_tokens=len(prompt.token_ids))
    driver, texts = driver_of(engine), [model.prompt() for _ in range(6)]
    add(driver, 0, texts[0], max_tokens=20)
    for _ in range(3):
        driver.step()
    add(driver, 1, prompt)
    for handle, text in enumerate(texts[1:], 2):
        add(driver, handle, text)
    while not driver.outputs[1]:
        driver.step(depth=2)
    assert not any(driver.outputs[handle] for handle in range(2, 7))
    driver.run(depth=2)
    driver.empty_ranks()
    for handle, each in enumerate([texts[0], prompt, *texts[1:]]):
        model.reference.check_greedy(each, driver.outputs[handle])


def test_prompt_that_no_step_can_compute_is_refused(model: Model, make_engine: Any) -> None:
    prompt = model.prompt(0)
    num_tokens = len(prompt.token_ids)
    engine = engine_of(model, make_engine, max_num_batched_tokens=num_tokens - 1)
    rejected = driver_of(engine).add(0, prompt.token_ids, media=prompt.media, **SAMPLING)
    assert rejected is not None
    assert rejected.grpc_status == "INVALID_ARGUMENT"
    assert f"has {num_tokens} tokens, all of which attend to each other" in rejected.error
    assert "max_num_batched_tokens" in rejected.error


def test_images_beyond_the_cache_are_refused(model: Model, make_engine: Any) -> None:
    prompt, engine = model.prompt(0, 1), engine_of(model, make_engine)
    assert (
        0 < engine.config.model.hf["sliding_window"] < prompt.media[0].num_tokens
    )  # which prompts see beyond
    cache = replace(engine.config.cache, encoder_cache_memory=100 * engine.config.encoder_row_bytes)
    config = replace(engine.config, cache=cache)
    rejected = driver_of(engine, config=config).add(0, prompt.token_ids, media=prompt.media, **SAMPLING)
    assert rejected is not None
    assert "which one step reads" in rejected.error


def test_outputs_of_one_prompt_share_it(model: Model, make_engine: Any) -> None:
    driver, prompt = driver_of(engine_of(model, make_engine)), model.prompt(0)
    add(driver, 0, prompt, n=3)
    driver.run(depth=2)
    driver.empty_ranks()
    for handle in range(3):
        assert len(driver.outputs[handle]) == NUM_TOKENS
        model.reference.check_greedy(prompt, driver.outputs[handle])


def test_logits_depend_on_the_order_of_attention(model: Model) -> None:
    """The reference tells a causal prompt from one that attends to all of itself."""
    import torch

    prompt = model.prompt(0)
    ids = torch.tensor([prompt.token_ids])
    with torch.inference_mode():
        whole, causal = (
            model.reference.model(
                ids, attention_mask=torch.ones_like(ids), token_type_ids=kind(ids), **prompt.arguments
            ).logits[0, -1]
            for kind in (torch.zeros_like, torch.ones_like)
        )
    assert (whole - causal).abs().max() > 1e-2
    assert max(prompt.token_ids[-9:]) < MAX_TEXT_TOKEN
