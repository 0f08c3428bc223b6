"""Videos in prompts give what transformers computes, with times as positions or as text between frames."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_driver import RankedDriver
from vision_kinds import VISION_KINDS
from vision_models import (
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    RandomVideo,
    VisionPrompt,
    VisionReference,
    make_prompt,
    random_image,
    save_model,
    shares_token,
)

# Times as positions; text between frames with deep features and experts; with states; and with tokens of images.
KINDS = ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm46v", "qwen4_exp")
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 256, "block_size": 4}
NUM_TOKENS = 6


class Model:
    """A small random model, and prompts with videos for it: one, one twice, one beside images, and one frame."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder, self._kind = folder, VISION_KINDS[kind]
        self._processor = save_model(self._kind, folder, seed=1)
        self.reference = VisionReference(folder)
        # Three and a half positions, and two thirds of one, between frames.
        long, wide, short = (RandomVideo(1, (5, 8, 6), 0.875), RandomVideo(2, (4, 4, 16), 1 / 6),
                             RandomVideo(3, (1, 6, 6), 1.0))  # fmt: skip
        image = random_image(random.Random(5), 32, 40)
        # transformers reads images or videos if they have the same token.
        several = (short, long) if shares_token(self.reference.model.config) else (image, long, image)
        self.prompts = [self.prompt(7, *each) for each in ((long,), (wide, wide), several, (short,))]
        self.other = self.prompt(7, RandomVideo(4, long.grid, long.seconds))

    def prompt(self, seed: int, *images: Any) -> VisionPrompt:
        rng = random.Random(seed)
        lens = [rng.randrange(5, 9) for _ in range(len(images) + 1)]
        return make_prompt(self._kind, self._processor, rng, images, lens, self.reference)


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


def run(model: Model, engine: Any, prompts: list[VisionPrompt]) -> RankedDriver:
    """Run prompts together, and compare the outputs with transformers."""
    driver = RankedDriver(engine.config.with_num_blocks(192), engine.step, engine.take_media)
    for handle, prompt in enumerate(prompts):
        driver.images.update(prompt.tensors)
        rejected = driver.add(
            handle, prompt.token_ids, media=prompt.media, max_tokens=NUM_TOKENS, ignore_eos=True,
            logit_bias={IMAGE_TOKEN: -100.0, VIDEO_TOKEN: -100.0},
        )  # fmt: skip
        assert rejected is None, rejected
    driver.run(depth=2)
    driver.empty_ranks()
    for handle, prompt in enumerate(prompts):
        assert len(driver.outputs[handle]) == NUM_TOKENS, driver.finishes[handle]
        model.reference.check_greedy(prompt, driver.outputs[handle])
    return driver


@pytest.mark.parametrize("tp", [1, 2])
def test_videos_give_the_tokens_of_transformers(model: Model, tp: int, make_engine: Any) -> None:
    """Also in chunks that end within frames, and between them."""
    for most in (512, 7):
        engine = make_engine(model.folder, tp, max_num_batched_tokens=most, **SETTINGS)
        run(model, engine, model.prompts)


def test_encoder_outputs_are_those_of_transformers(model: Model, make_engine: Any) -> None:
    engine = make_engine(model.folder, **SETTINGS)
    encoder = engine.runners[0].memory.loaded.encoder
    for prompt in model.prompts[:2]:
        with torch.inference_mode():
            videos = model.reference.encode_videos(prompt)
            for item, expected in zip(prompt.media, videos, strict=True):
                tensors = {name: torch.from_numpy(each) for name, each in prompt.tensors[item.digest].items()}
                encoding = encoder.encode(tensors)
                while True:
                    try:
                        next(encoding)
                    except StopIteration as end:
                        torch.testing.assert_close(end.value, expected, rtol=1e-4, atol=1e-4)
                        break


def test_a_prefix_with_a_video_is_found_with_that_video_only(model: Model, make_engine: Any) -> None:
    engine = make_engine(model.folder, **SETTINGS)
    first, other = model.prompts[0], model.other
    assert first.token_ids == other.token_ids
    driver = RankedDriver(engine.config.with_num_blocks(192), engine.step, engine.take_media)
    num_cached = []
    for handle, prompt in enumerate((first, other, first)):
        driver.images.update(prompt.tensors)
        driver.add(handle, prompt.token_ids, media=prompt.media, max_tokens=NUM_TOKENS, ignore_eos=True,
                   logit_bias={IMAGE_TOKEN: -100.0, VIDEO_TOKEN: -100.0})  # fmt: skip
        driver.run()
        num_cached.append(driver.finishes[handle].num_cached_tokens)
        model.reference.check_greedy(prompt, driver.outputs[handle])
    assert num_cached[1] <= first.media[0].start
    assert num_cached[2] >= first.media[0].end // 4 * 4
    driver.empty_ranks()
