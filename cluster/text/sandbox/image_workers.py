"""ImageWorkers: an ImageProcessor that works in processes of its own, since images of users are hostile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from ....proto.config import EngineConfig
from ....proto.errors import ConfigError
from ....proto.media import MediaAssembly, TensorLayout
from ..media.image_source import ImageError, ImageSource, ProcessedImage
from ..media.transformers_processor import video_problem
from .worker_pool import LimitExceeded, WorkerPool, receive_bulk

# Tenants may use two at once.
NUM_WORKERS = 3
# Processor time of one image. 64 million pixels take 4 s.
PROCESS_TIME_S = 15.0
# From the task to its answer. The first task of a process loads the libraries, for 2 s of processor time.
TASK_TIMEOUT_S = 60.0


class ImageWorkers(WorkerPool):
    """Processes that decode and process the images of one model. Threads may share one; calls block."""

    def __init__(self, config: EngineConfig, num_workers: int = NUM_WORKERS) -> None:
        vision = config.model.vision
        assert vision is not None, "the model reads images"
        self._video_token_id = vision.video_token_id
        tokens = vision.image_token_id, vision.video_token_id
        setup = config.model.path, *tokens, config.images.processor_settings
        super().__init__("process image", msgpack.packb((*setup, False)), num_workers, "process the image")
        # Of their own, since they need torch. None is started before a video comes.
        self._for_videos = WorkerPool(
            "process image", msgpack.packb((*setup, True)), num_workers, "process the video"
        )

    @property
    def video_problem(self) -> str:
        """See ImageProcessor."""
        return video_problem(self._video_token_id)

    def close(self) -> None:
        """End the processes of both kinds; see WorkerPool."""
        super().close()
        self._for_videos.close()

    def process(self, source: ImageSource, settings: Mapping[str, Any], root: bytes) -> ProcessedImage:
        """Raises the errors of `run` that are no fault of the image, and ConfigError for an unusable model."""
        task = {
            "source": {
                "data": source.data,
                "url": "" if source.data else source.url,
                "detail": source.detail,
                "kind": source.kind,
                "frames": source.frames,
            },
            "settings": dict(settings),
            "root": root,
            "time_s": PROCESS_TIME_S,
        }
        try:
            pool = self._for_videos if source.kind == "video" else self
            head, data = pool.run(task, TASK_TIMEOUT_S, receive_bulk)
        except TimeoutError:
            raise ImageError(f"was not read within {TASK_TIMEOUT_S:g} s; send a smaller one") from None
        except LimitExceeded:
            raise ImageError("needs too much memory or time to be read; send a smaller one") from None
        if "unusable" in head:
            raise ConfigError(head["unusable"])
        if "problem" in head:
            raise ImageError(head["problem"])
        layout = tuple(TensorLayout(name, dtype, tuple(shape)) for name, dtype, shape in head.pop("layout"))
        tensors = MediaAssembly.of(layout, data).tensors()
        return ProcessedImage(
            **head | {"token_ids": tuple(head["token_ids"]), "grid": tuple(head["grid"]), "tensors": tensors}
        )
