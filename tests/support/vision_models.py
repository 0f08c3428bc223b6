"""Small random models that read images, prompts with images for them, and their greedy tokens by transformers."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from quire.proto.media import MediaItem, MediaTensors
from quire.proto.step import RowLogitsProcessors

VOCAB_SIZE = 128
IMAGE_TOKEN, START_TOKEN, END_TOKEN, VIDEO_TOKEN = 120, 121, 122, 123
# Of text tokens, which are none of the special ones.
MAX_TEXT_TOKEN = 110
# transformers embeds a generated token of an image as no token of text.
NO_MEDIA = RowLogitsProcessors(logit_bias=((IMAGE_TOKEN, -100.0), (VIDEO_TOKEN, -100.0)))


@dataclass(frozen=True)
class VisionPrompt:
    """A prompt with images.

    Attributes:
        arguments: of the model in transformers, beside the tokens.
    """

    token_ids: list[int]
    media: tuple[MediaItem, ...]
    tensors: dict[bytes, MediaTensors]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class VisionKind:
    """A kind of model.

    Attributes:
        make_config: returns a configuration of transformers for random sizes.
        make_processor: returns its image processor.
        expand: tensors of one image |-> its tokens, and the grid of a MediaItem; None for as many image tokens as
            transformers has embeddings.
        names: beginnings of tensors' names as transformers writes them, and those of published checkpoints.
        unreached: modules of the encoder that only larger images reach.
        sees_whole_prompt: as in ModelConfig.
    """

    architecture: str
    make_config: Callable[[random.Random], Any]
    make_processor: Callable[[Any], Any]
    expand: Callable[[MediaTensors], tuple[list[int], tuple[int, ...]]] | None = None
    names: tuple[tuple[str, str], ...] = ()
    unreached: tuple[str, ...] = ()
    sees_whole_prompt: bool = False


@dataclass(frozen=True)
class RandomVideo:
    """A video as a processor for videos makes it, with random numbers as its patches.

    Attributes:
        grid: frames, each of two images, and rows and columns of patches.
        seconds: time from a frame to the next one, for a model that reads times by their positions.
    """

    seed: int
    grid: tuple[int, int, int]
    seconds: float

    def tensors(self, config: Any) -> MediaTensors:
        """Return the tensors for an encoder, which are named as those of an image."""
        vision = config.vision_config
        length = 3 * vision.temporal_patch_size * vision.patch_size**2
        shape = (self.grid[0] * self.grid[1] * self.grid[2], length)
        pixels = np.random.default_rng(self.seed).standard_normal(shape, np.float32)
        return {"pixel_values": pixels, "image_grid_thw": np.array([self.grid])}

    def arguments(self, tensors: MediaTensors, config: Any) -> MediaTensors:
        """Return the tensors by the names of transformers."""
        found = {"pixel_values_videos": tensors["pixel_values"], "video_grid_thw": tensors["image_grid_thw"]}
        if _has_times(config):
            found["second_per_grid_ts"] = np.array([self.seconds], np.float32)
        return found

    def item(self, start: int, rng: random.Random, config: Any) -> tuple[list[int], MediaItem]:
        """Return the tokens and the item. Frames are apart, with their times in text, unless these are positions."""
        frames, rows, columns = self.grid
        token_id = IMAGE_TOKEN if shares_token(config) else VIDEO_TOKEN
        frame, step = [token_id] * (rows // 2 * (columns // 2)), 1.0
        tokens = frame * frames
        if _has_times(config):
            step = float(np.float32(config.vision_config.tokens_per_second) * np.float32(self.seconds))
        else:
            times = [
                [rng.randrange(MAX_TEXT_TOKEN) for _ in range(rng.randrange(1, 5))] for _ in range(frames - 1)
            ]
            tokens = frame + [
                token for time in times for token in (END_TOKEN, *time, START_TOKEN, *frame)
            ]  # fmt: skip
        digest = hashlib.blake2b(repr(self).encode(), digest_size=16).digest()
        num_bytes = sum(each.nbytes for each in self.tensors(config).values())
        return tokens, MediaItem(
            digest, start, len(tokens), len(frame) * frames, self.grid, num_bytes, step
        )  # fmt: skip


def _has_times(config: Any) -> bool:
    return hasattr(config.vision_config, "tokens_per_second")


def shares_token(config: Any) -> bool:
    """Return whether frames of videos have the tokens of images, as in GLM-4V."""
    return config.model_type in ("glm4v", "glm4v_moe", "glm46v")


def random_image(rng: random.Random, width: int, height: int) -> Image.Image:
    """Return an image of noise in large squares."""
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def save_model(kind: VisionKind, folder: Path, seed: int) -> Any:
    """Save a random model; return its image processor."""
    import transformers

    torch.manual_seed(seed)
    config = kind.make_config(random.Random(seed))
    config.architectures = [kind.architecture]
    model = getattr(transformers, kind.architecture)(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
        elif parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.05
    persistent = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point() and buffer.isfinite().all():
            buffer += torch.randn_like(buffer) * 0.1
    model.save_pretrained(folder)
    if kind.names:
        _rename_tensors(folder / "model.safetensors", kind.names)
    return kind.make_processor(config)


def _rename_tensors(file: Path, names: Sequence[tuple[str, str]]) -> None:
    tensors = load_file(file)
    for written, published in names:
        found = [name for name in tensors if name.startswith(written)]
        assert found, written
        tensors |= {published + name.removeprefix(written): tensors.pop(name) for name in found}
    save_file(tensors, file, metadata={"format": "pt"})


def make_prompt(
    kind: VisionKind,
    processor: Any,
    rng: random.Random,
    images: Sequence[Image.Image | RandomVideo],
    text_lens: Sequence[int],
    reference: VisionReference,
) -> VisionPrompt:
    """Return a prompt of texts of these lengths with an image or a video between each two of them."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    tensors: dict[bytes, MediaTensors] = {}
    parts: list[MediaTensors] = []
    for index, length in enumerate(text_lens):
        tokens += [rng.randrange(MAX_TEXT_TOKEN) for _ in range(length)]
        if index == len(images):
            continue
        image = images[index]
        if isinstance(image, RandomVideo):
            config = reference.model.config
            expanded, item = image.item(len(tokens) + 1, rng, config)
            tensors[item.digest] = image.tensors(config)
            parts.append(image.arguments(tensors[item.digest], config))
            media.append(item)
            tokens += [START_TOKEN, *expanded, END_TOKEN]
            continue
        own = {name: np.asarray(each) for name, each in processor(image, return_tensors="np").items()}
        parts.append(own)
        expanded, grid = (reference.expand if kind.expand is None else kind.expand)(own)
        digest = hashlib.blake2b(image.tobytes() + repr(image.size).encode(), digest_size=16).digest()
        tensors[digest] = own
        num_embeddings = expanded.count(IMAGE_TOKEN)
        num_bytes = sum(each.nbytes for each in own.values())
        tokens.append(START_TOKEN)
        media.append(MediaItem(digest, len(tokens), len(expanded), num_embeddings, grid, num_bytes))
        tokens += [*expanded, END_TOKEN]
    arguments = {
        name: _concatenate([own[name] for own in parts if name in own])
        for name in dict.fromkeys(name for own in parts for name in own)
    }
    return VisionPrompt(tokens, tuple(media), tensors, arguments)


def _concatenate(tensors: Sequence[np.ndarray]) -> torch.Tensor:
    """Return tensors one after the other; those of smaller images are padded with zeros."""
    largest = np.max([each.shape[1:] for each in tensors], axis=0).tolist()
    widths = [
        [(0, most - own) for most, own in zip(largest, each.shape[1:], strict=True)] for each in tensors
    ]
    padded = [np.pad(each, [(0, 0), *width]) for each, width in zip(tensors, widths, strict=True)]
    return torch.from_numpy(np.concatenate(padded))


class VisionReference:
    """The model of a folder in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.base = getattr(self.model, "model", self.model)

    def num_encoder_parameters(self, prompt: VisionPrompt, unreached: Sequence[str] = ()) -> int:
        """Return the number of parameters that the embeddings of a prompt's images depend on.

        Args:
            unreached: modules that are counted, too.
        """
        torch.cat([each.flatten() for each in self.encode(prompt)]).sum().backward()
        found: int = sum(
            each.numel()
            for name, each in self.model.named_parameters()
            if each.grad is not None or any(f".{module}." in name for module in unreached)
        )
        self.model.zero_grad(set_to_none=True)
        return found

    def encode(self, prompt: VisionPrompt) -> list[torch.Tensor]:
        """Return the embeddings of each image of a prompt, with their deep features beside them."""
        return self._to_embeddings(prompt, self.base.get_image_features(**prompt.arguments))

    def _to_embeddings(self, prompt: VisionPrompt, output: Any) -> list[torch.Tensor]:
        if self.model.config.model_type == "llama4":
            output = self.base.multi_modal_projector(output.last_hidden_state)
        found = [each.flatten(0, -2) for each in getattr(output, "pooler_output", output)]
        if len(found) > len(prompt.media) > 0:  # embeddings of tiles
            tiles = [len(prompt.tensors[item.digest]["pixel_values"]) for item in prompt.media]
            parts = iter(found)
            found = [torch.cat([*islice(parts, count)]) for count in tiles]
        if (deep := getattr(output, "deepstack_features", None)) is not None:
            found = [
                torch.cat((each, *(layer[index] for layer in deep)), 1) for index, each in enumerate(found)
            ]
        return found

    def encode_videos(self, prompt: VisionPrompt) -> list[torch.Tensor]:
        """Return the embeddings of each video of a prompt, with their deep features beside them."""
        arguments = {name: prompt.arguments[name] for name in ("pixel_values_videos", "video_grid_thw")}
        return self._to_embeddings(prompt, self.base.get_video_features(**arguments))

    @torch.inference_mode()
    def expand(self, tensors: MediaTensors) -> tuple[list[int], tuple[int, ...]]:
        """Return as many image tokens as one image has embeddings."""
        arguments = {name: torch.from_numpy(each.copy()) for name, each in tensors.items()}
        found = self.encode(VisionPrompt([], (), {}, arguments))
        return [IMAGE_TOKEN] * sum(map(len, found)), ()

    @torch.inference_mode()
    def check_greedy(self, prompt: VisionPrompt, generated: Sequence[int], tie: float = 3e-4) -> None:
        """Assert that each token is the most likely one after its prefix, up to near-ties.

        The tokens of images and videos must not be among them.
        """
        ids = torch.tensor([prompt.token_ids + list(generated)])
        arguments = dict(prompt.arguments)
        is_image = (ids == IMAGE_TOKEN).int()
        if "video_grid_thw" in arguments:
            is_image = (
                is_image * 2 if shares_token(self.model.config) else is_image + 2 * (ids == VIDEO_TOKEN)
            )
        if self.model.config.model_type == "paligemma":  # all of a prompt is of type 0
            is_image = (torch.arange(ids.shape[1])[None] >= len(prompt.token_ids)).int()
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(self.base.forward).parameters:
                arguments[name] = is_image
        logits = self.model(ids, attention_mask=torch.ones_like(ids), **arguments).logits[0]
        logits[:, [IMAGE_TOKEN, VIDEO_TOKEN]] = -torch.inf
        for token_id, row in zip(generated, logits[len(prompt.token_ids) - 1 : -1], strict=True):
            assert row.max() - row[token_id] < tie, f"{int(row.argmax())} is more likely than {token_id}"
