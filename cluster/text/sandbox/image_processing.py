"""Operation of image workers: decodes an image or a video, and processes it for the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from ....proto.errors import ConfigError
from ....proto.media import layout_of
from ..media.image_source import ImageError, ImageSource
from .limits import limits, used_bytes
from .worker_pool import Bulk

# Beyond what the idle process has. 64 million pixels take 192 MB decoded, twice while they are turned, and up to 512
# MB as tensors, of which processors make two or three copies.
MEMORY_BYTES = 3 << 30


class TimeIsOver(BaseException):
    """The image has used up its time. Not an Exception, which decoders would take for their own."""


def prepare(setup: bytes) -> Callable[[dict[str, Any]], Bulk]:
    """Return the operation of a model.

    Args:
        setup: the model's directory, its tokens of images and videos, settings of its image processor, and whether
            the process is for videos.
    """
    os.environ |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # a request's settings may name a device, whose memory is the ranks'
    )
    path, image_token_id, video_token_id, settings, is_for_videos = msgpack.unpackb(setup)
    from ..media.transformers_processor import TransformersImageProcessor, needs_torchvision

    if not is_for_videos and not needs_torchvision(Path(path)):
        # Without torch, transformers takes 2 instead of 5 s and 70 instead of 410 MB.
        sys.modules["torch"] = None  # type: ignore[assignment]
    processor = TransformersImageProcessor(path, image_token_id, settings, video_token_id=video_token_id)
    try:
        processor.load()
        if is_for_videos:
            with suppress(ImageError):  # which a video meets again
                processor.load_video_processor()
    except ConfigError as error:
        return partial(_fail, str(error))
    return partial(_process, processor, used_bytes())


def _fail(problem: str, task: dict[str, Any]) -> Bulk:
    return Bulk({"unusable": problem})


def _process(processor: Any, idle_bytes: int, task: dict[str, Any]) -> Bulk:
    """Return the processed image with its tensors, or the problem."""
    source = ImageSource(**task["source"] | {"frames": tuple(task["source"]["frames"])})
    try:
        with limits(idle_bytes + MEMORY_BYTES, task["time_s"], _on_time_over):
            found = processor.process(source, task["settings"], task["root"])
            layout = layout_of(found.tensors)
    except ImageError as error:
        return Bulk({"problem": str(error)})
    except TimeIsOver:
        return Bulk(
            {"problem": f"needs more than {task['time_s']:g} s of processor time; send a smaller one"}
        )
    except MemoryError:
        return Bulk({"problem": "needs too much memory to be read; send a smaller one"})
    head = {
        "digest": found.digest,
        "placeholder": found.placeholder,
        "expansion": found.expansion,
        "token_ids": found.token_ids,
        "num_embeddings": found.num_embeddings,
        "grid": found.grid,
        "kind": found.kind,
        "seconds_per_frame": found.seconds_per_frame,
        "layout": [(each.name, each.dtype, each.shape) for each in layout],
    }
    return Bulk(head, tuple(found.tensors.values()))


def _on_time_over(signal_number: int, frame: object) -> None:
    raise TimeIsOver
