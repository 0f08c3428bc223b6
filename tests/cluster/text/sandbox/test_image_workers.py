"""Images are processed in processes with limits of memory and time, which are replaced when they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from image_models import file_of, frames_url, picture, save_qwen_vl
from PIL import Image
from transformers.utils import is_torchvision_available

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.cluster.text.media.image_source import ImageError, ImageSource
from quire.cluster.text.media.transformers_processor import local_image_processor
from quire.cluster.text.sandbox import image_workers
from quire.cluster.text.sandbox.image_workers import ImageWorkers
from quire.proto.config import EngineConfig
from quire.proto.errors import ConfigError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = save_qwen_vl(tmp_path_factory.mktemp("qwen-vl"), max_pixels=1 << 20)
    return resolve(EngineOptions(str(folder), device="cpu"), Machine(2, 0))


@pytest.fixture(scope="module")
def workers(config: EngineConfig) -> Iterator[ImageWorkers]:
    workers = ImageWorkers(config, 1)
    workers.start()
    yield workers
    workers.close()


def test_answer_is_that_of_the_same_processor_here(workers: ImageWorkers, config: EngineConfig) -> None:
    source = ImageSource(data=file_of(picture(700, 500)))  # 8 MB of patches
    local = local_image_processor(config)
    assert local is not None
    for settings in ({}, {"max_pixels": 4096}):
        found, expected = workers.process(source, settings, b"root"), local.process(source, settings, b"root")
        assert replace(found, tensors={}) == replace(expected, tensors={})
        assert found.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            np.testing.assert_array_equal(found.tensors[name], tensor)


def test_videos_are_processed_in_processes_of_their_own(workers: ImageWorkers, config: EngineConfig) -> None:
    if not is_torchvision_available():
        pytest.skip("torchvision is not installed")
    frames = [picture(60, 44, seed) for seed in range(3)]
    source = ImageSource(kind="video", url=frames_url(frames, "JPEG"))
    local = local_image_processor(config)
    assert local is not None
    found, expected = workers.process(source, {"fps": 4}, b"root"), local.process(source, {"fps": 4}, b"root")
    assert replace(found, tensors={}) == replace(expected, tensors={})
    np.testing.assert_array_equal(found.tensors["pixel_values"], expected.tensors["pixel_values"])
    with pytest.raises(ImageError, match="of which number 4 is empty"):
        workers.process(replace(source, url=source.url + ","), {}, b"root")
    large = ImageSource(kind="video", frames=(file_of(Image.new("L", (6000, 6000))),) * 2)
    with pytest.raises(ImageError, match="number 1 has 6000 by 6000 pixels, must have at most 33,554,432"):
        workers.process(large, {}, b"root")
    assert workers.process(ImageSource(data=file_of(frames[0])), {}, b"").kind == "image"


def test_bad_image_is_an_error_and_the_process_goes_on(workers: ImageWorkers) -> None:
    workers.process(ImageSource(data=file_of(picture(8, 8))), {}, b"")
    process = workers._workers[0].process
    assert process is not None
    with pytest.raises(ImageError, match="is no image that can be read"):
        workers.process(ImageSource(data=b"noise"), {}, b"")
    with pytest.raises(ImageError, match="wrong base64"):
        workers.process(ImageSource(url="data:image/png;base64,%"), {}, b"")
    workers.process(ImageSource(data=file_of(picture(8, 8))), {}, b"")
    assert workers._workers[0].process is process


def test_image_that_takes_too_long_is_refused(workers: ImageWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_workers, "PROCESS_TIME_S", 0.001)
    with pytest.raises(ImageError, match=r"needs more than 0\.001 s of processor time"):
        workers.process(ImageSource(data=file_of(picture(1200, 900))), {}, b"")


def test_image_whose_tensors_do_not_fit_is_refused(workers: ImageWorkers) -> None:
    huge = {"size": {"shortest_edge": 1 << 40, "longest_edge": 1 << 41}}
    with pytest.raises(ImageError, match=r"memory|cannot be processed|too large"):
        workers.process(ImageSource(data=file_of(picture(64, 64))), huge, b"")


def test_killed_process_is_replaced(workers: ImageWorkers) -> None:
    source = ImageSource(data=file_of(picture(8, 8)))
    before = workers.process(source, {}, b"")
    process = workers._workers[0].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert workers.process(source, {}, b"").digest == before.digest


def test_folder_without_an_image_processor_is_named(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    workers = ImageWorkers(replace(config, model=replace(config.model, path=str(tmp_path))), 1)
    try:
        with pytest.raises(ConfigError, match="image processor cannot be loaded"):
            workers.process(ImageSource(data=file_of(picture(8, 8))), {}, b"")
    finally:
        workers.close()
