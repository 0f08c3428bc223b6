"""TransformersImageProcessor: images and videos by the model's own processor of transformers, one at a time.

The family's processor runs without its part for videos, which needs torchvision, until a video comes. What it writes
into a prompt in place of an image is recorded, so that hardly a family needs code here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ....proto.config import EngineConfig
from ....proto.errors import ConfigError, first_line
from ....proto.media import MEDIA_DIGEST_BYTES, MEDIA_DTYPES, MediaTensors, layout_of
from ....proto.model.transformers_spec import import_transformers
from ....proto.vision import MediaKind
from .image_file import MAX_PIXELS, open_image, open_video
from .image_source import ImageError, ImageSource, ProcessedImage

# Outputs of a processor that are of the text, or of use to it alone.
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
_OF_PROCESSOR = frozenset(
    {"num_crops", "rows", "cols", "aspect_ratios", "num_patches", "num_local_patches", "patch_newline_masks"}
    | {"batch_num_images", "second_per_grid_ts"}
)
# Tensors of a video |-> their names for an encoder, which reads a video as an image of several frames.
_OF_VIDEO = {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"}
# Model types whose image processors in transformers need torchvision, and with it torch.
_ON_TORCHVISION = frozenset({"llama4", "kimi_k25", "step3p7", "muse_spark", "minimax_m3_vl"})
# Arguments of a processor that are no settings: it would fetch images, videos and sound of URLs and of files.
_RESERVED = frozenset({"images", "videos", "audio", "audios", "text", "return_tensors", "add_special_tokens"})
# Frames per second of a video, for processors that do not state how many they read.
_FPS = 2.0
_MIN_FPS, _MAX_FPS = 0.001, 1000.0
_CONFIG_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


class TransformersImageProcessor:
    """Implements ImageProcessor in the caller's thread, one image at a time.

    Args:
        path: the model's directory.
        image_token_id: the token in whose place an embedding stands.
        settings: settings of the image processor that replace the model's own.
        video_token_id: as image_token_id, of videos; None for a model that reads none.
    """

    def __init__(
        self,
        path: str,
        image_token_id: int,
        settings: Mapping[str, Any] | None = None,
        max_pixels: int = MAX_PIXELS,
        video_token_id: int | None = None,
    ) -> None:
        self._path = path
        self._token_ids: dict[MediaKind, int | None] = {"image": image_token_id, "video": video_token_id}
        self._settings = dict(settings or {})
        self._max_pixels = max_pixels
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._on_torchvision = False

    @property
    def video_problem(self) -> str:
        """See ImageProcessor."""
        return video_problem(self._token_ids["video"])

    def load(self) -> None:
        """Load the processor, which the first image does otherwise.

        Raises:
            ConfigError: the directory lacks what the processor needs, or the family has none.
        """
        if self._loaded is not None:
            return
        try:
            loaded = _load(Path(self._path))
            self._on_torchvision = needs_torchvision(Path(self._path))
        except ConfigError:
            raise
        except Exception as error:  # transformers passes on the exceptions of its parsers
            raise ConfigError(
                f"{self._path}: the image processor cannot be loaded: {first_line(error)}"
            ) from error
        self._loaded = loaded

    def process(self, source: ImageSource, settings: Mapping[str, Any], root: bytes) -> ProcessedImage:
        """Raises ConfigError as `load` does."""
        kind = source.kind
        pixels = (open_video if kind == "video" else open_image)(source, self._max_pixels)
        with self._lock:
            self.load()
            settings = self._settings | dict(settings)
            if kind == "video":
                self.load_video_processor()
                settings["fps"] = _fps(self._loaded.video_processor, settings)
            return self._process(kind, pixels, settings, root)

    def load_video_processor(self) -> None:
        """Load the part for videos, which the first video does otherwise. Raises ImageError if it cannot be."""
        if getattr(self._loaded, "video_processor", None) is not None:
            return
        try:
            self._loaded.video_processor = import_transformers().AutoVideoProcessor.from_pretrained(
                self._path, local_files_only=True
            )
        except Exception as error:
            raise ImageError(
                f"is a video, and its processor cannot be loaded: {first_line(error)}"
            ) from error

    def _process(self, kind: MediaKind, pixels: Any, settings: dict[str, Any], root: bytes) -> ProcessedImage:
        processor, token_id = self._loaded, self._token_ids[kind]
        placeholder = getattr(processor, f"{kind}_token")
        if reserved := sorted(settings.keys() & _RESERVED):
            raise ImageError(f"cannot be processed: its settings have {', '.join(reserved)}")
        arguments = {f"{kind}s": [pixels], "return_tensors": "pt" if self._on_torchvision else "np"}
        if kind == "video":
            arguments |= _as_frames(len(pixels), settings["fps"])
        try:
            found = processor(text=[placeholder], add_special_tokens=False, **settings | arguments)
        except MemoryError:
            raise
        except Exception as error:
            raise ImageError(f"cannot be processed: {first_line(error)}") from error
        (expansion,) = processor.expansions
        token_ids = tuple(np.asarray(found["input_ids"]).reshape(-1).tolist())
        num_embeddings = token_ids.count(token_id)
        if not num_embeddings:
            raise ImageError(f"has no tokens with the id {token_id} of the model's {kind}s")
        tensors = _tensors(found)
        try:
            layout = layout_of(tensors)
        except ValueError as error:
            raise ImageError(f"is too large: {error}") from error
        grid = tensors["image_grid_thw"].reshape(-1).tolist() if "image_grid_thw" in tensors else ()
        part = getattr(processor, f"{kind}_processor")
        described = (type(processor).__name__, part.to_dict())
        digest = blake2b(digest_size=MEDIA_DIGEST_BYTES)
        for each in (
            root,
            *(json.dumps(own, sort_keys=True, default=repr).encode() for own in (described, settings)),
        ):
            digest.update(len(each).to_bytes(4, "little") + each)
        digest.update(repr((token_ids, layout)).encode())
        for tensor in tensors.values():
            digest.update(memoryview(tensor.reshape(-1).view(np.uint8).data))
        seconds = float(np.asarray(found["second_per_grid_ts"])[0]) if "second_per_grid_ts" in found else 0.0
        return ProcessedImage(
            digest.digest(),
            placeholder,
            expansion,
            token_ids,
            num_embeddings,
            tuple(grid),
            tensors,
            kind,
            seconds,
        )


def _fps(video_processor: Any, settings: Mapping[str, Any]) -> float:
    """Return the frames per second of a video. Raises ImageError for another value than a positive number."""
    fps = settings.get("fps", getattr(video_processor, "fps", None) or _FPS)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not _MIN_FPS <= fps <= _MAX_FPS:
        raise ImageError(f"has {fps!r:.40} frames per second, must have {_MIN_FPS:g} to {_MAX_FPS:g} (fps)")
    return float(fps)


def _as_frames(num_frames: int, fps: float) -> dict[str, Any]:
    """Return the arguments of a processor for a video whose frames were chosen by the client."""
    metadata = {"total_num_frames": num_frames, "fps": fps, "frames_indices": list(range(num_frames))}
    chosen = {"do_sample_frames": False, "num_frames": None, "video_metadata": [metadata]}
    return chosen | {"return_tensors": "pt"}


def video_problem(video_token_id: int | None) -> str:
    """Return why a model's videos cannot be processed here; empty if they can."""
    if video_token_id is None:
        return "the model reads text and images only"
    return "" if find_spec("torchvision") else "the server lacks torchvision, which processes videos"


def local_image_processor(config: EngineConfig) -> TransformersImageProcessor | None:
    """Return the processor of a model's images for a process that trusts them; None if it reads text alone."""
    vision = config.model.vision
    if vision is None:
        return None
    return TransformersImageProcessor(
        config.model.path,
        vision.image_token_id,
        config.images.processor_settings,
        video_token_id=vision.video_token_id,
    )


class _ImagesAlone:
    """Mixin before a family's processor: it needs no part for videos or sound, and records what images expand to."""

    expansions: list[str]

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if argument is None and name in ("video_processor", "feature_extractor"):
            return None
        parent: Any = super()
        return parent.check_argument_for_proper_class(name, argument)

    def _process_images(self, images: Any, **settings: Any) -> Any:
        parent: Any = super()
        processed, self.expansions = parent._process_images(images, **settings)
        return processed, self.expansions

    def _process_videos(self, videos: Any, **settings: Any) -> Any:
        parent: Any = super()
        processed, self.expansions = parent._process_videos(videos, **settings)
        return processed, self.expansions


def needs_torchvision(path: Path) -> bool:
    """Return whether the processor of a model directory needs torchvision; the others run on PIL, without torch."""
    return _model_type(path) in _ON_TORCHVISION


def _model_type(path: Path) -> Any:
    return json.loads((path / "config.json").read_bytes()).get("model_type")


def _load(path: Path) -> Any:
    """Return the processor of a model directory."""
    transformers = import_transformers()
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    from .family_processors import OWN_PROCESSORS

    model_type = _model_type(path)
    backend = "torchvision" if model_type in _ON_TORCHVISION else "pil"
    name = next(filter(None, map(_processor_name, (path / file for file in _CONFIG_FILES))), None)
    name = name or PROCESSOR_MAPPING_NAMES.get(model_type)
    family: Any = None if name is None else OWN_PROCESSORS.get(name) or processor_class_from_name(name)
    if family is None:
        raise ConfigError(f"transformers has no processor {name or model_type!r}")
    if getattr(family, "is_dummy", False):
        raise ConfigError(f"{name} of transformers needs torchvision")
    if not hasattr(family, "replace_image_token"):
        raise ConfigError(f"images need transformers 5.20 or later, this is {transformers.__version__}")
    arguments = {"trust_remote_code": False, "local_files_only": True}
    parts = {
        "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(
            path, backend=backend, **arguments
        ),
        "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(path, **arguments),
    }
    kind: Any = type(family.__name__, (_ImagesAlone, family), {})
    given = [parts.get(part, lambda: None)() for part in family.get_attributes()]
    described, _ = family.get_processor_dict(path, local_files_only=True)
    # A saved processor has its parts' settings in the same file.
    described = {key: value for key, value in described.items() if key not in family.get_attributes()}
    return kind.from_args_and_dict(given, described)


def _processor_name(file: Path) -> str | None:
    try:
        name = json.loads(file.read_bytes()).get("processor_class")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def _tensors(found: Mapping[str, Any]) -> MediaTensors:
    """Return what the encoder reads of a processor's outputs, as arrays of the types that travel."""
    arrays = {
        _OF_VIDEO.get(name, name): _array(value)
        for name, value in found.items()
        if name not in _OF_TEXT | _OF_PROCESSOR
    }
    return {name: _plain(array) for name, array in arrays.items() if array.dtype.kind in "fiub"}


def _array(value: Any) -> Any:
    """Return an array of an output, which on torchvision is a tensor, of Llama 4 in bfloat16."""
    is_tensor = hasattr(value, "is_floating_point")
    return np.asarray(value.float() if is_tensor and value.is_floating_point() else value)


def _plain(array: Any) -> Any:
    if array.dtype.str not in MEDIA_DTYPES:
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return np.ascontiguousarray(array)
