"""Small random models that read images, prompts with images for them, and their greedy tokens by transformers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from quire.proto.media import MediaItem, MediaTensors

VOCAB_SIZE = 128
IMAGE_TOKEN, START_TOKEN, END_TOKEN, VIDEO_TOKEN = 120, 121, 122, 123
# Of text tokens, which are none of the special ones.
MAX_TEXT_TOKEN = 110


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
        expand: tensors of one image |-> its tokens, and the grid of a MediaItem.
    """

    architecture: str
    make_config: Callable[[random.Random], Any]
    make_processor: Callable[[Any], Any]
    expand: Callable[[MediaTensors], tuple[list[int], tuple[int, ...]]]


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
    model.save_pretrained(folder)
    return kind.make_processor(config)


def make_prompt(
    kind: VisionKind,
    processor: Any,
    rng: random.Random,
    images: Sequence[Image.Image],
    text_lens: Sequence[int],
) -> VisionPrompt:
    """Return a prompt of texts of these lengths with an image between each two of them."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    tensors: dict[bytes, MediaTensors] = {}
    parts: list[MediaTensors] = []
    for index, length in enumerate(text_lens):
        tokens += [rng.randrange(MAX_TEXT_TOKEN) for _ in range(length)]
        if index == len(images):
            continue
        own = {name: np.asarray(each) for name, each in processor(images[index], return_tensors="np").items()}
        parts.append(own)
        expanded, grid = kind.expand(own)
        digest = hashlib.blake2b(
            images[index].tobytes() + repr(images[index].size).encode(), digest_size=16
        ).digest()
        tensors[digest] = own
        num_embeddings = expanded.count(IMAGE_TOKEN)
        num_bytes = sum(each.nbytes for each in own.values())
        tokens.append(START_TOKEN)
        media.append(MediaItem(digest, len(tokens), len(expanded), num_embeddings, grid, num_bytes))
        tokens += [*expanded, END_TOKEN]
    arguments = {name: _concatenate([own[name] for own in parts]) for name in (parts[0] if parts else ())}
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

    @property
    def encoder(self) -> torch.nn.Module:
        """Return the encoder, with what makes embeddings of its outputs."""
        names = ("visual", "vision_tower", "multi_modal_projector")
        found = [getattr(self.model.model, name, None) for name in names]
        return torch.nn.ModuleList([each for each in found if each is not None])

    def encode(self, prompt: VisionPrompt) -> list[torch.Tensor]:
        """Return the embeddings of each image of a prompt, with their deep features beside them."""
        output = self.model.get_image_features(**prompt.arguments)
        found = list(getattr(output, "pooler_output", output))
        if (deep := getattr(output, "deepstack_features", None)) is not None:
            found = [
                torch.cat((each, *(layer[index] for layer in deep)), 1) for index, each in enumerate(found)
            ]
        return found

    @torch.inference_mode()
    def check_greedy(self, prompt: VisionPrompt, generated: Sequence[int], tie: float = 3e-4) -> None:
        """Assert that each token is the most likely one after its prefix, up to near-ties."""
        ids = torch.tensor([prompt.token_ids + list(generated)])
        arguments = dict(prompt.arguments)
        if hasattr(self.model.model, "get_rope_index"):
            arguments["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
        logits = self.model(ids, attention_mask=torch.ones_like(ids), **arguments).logits[0]
        logits[:, [IMAGE_TOKEN, VIDEO_TOKEN]] = -torch.inf
        for token_id, row in zip(generated, logits[len(prompt.token_ids) - 1 : -1], strict=True):
            assert row.max() - row[token_id] < tie, f"{int(row.argmax())} is more likely than {token_id}"


def _qwen2_5_vl(rng: random.Random) -> Any:
    from transformers import Qwen2_5_VLConfig

    head_dim = rng.choice((16, 32))
    pairs = head_dim // 2
    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 4)))
    first = rng.randrange(1, pairs - 2)
    second = rng.randrange(1, pairs - first)
    hidden = heads * head_dim
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": hidden, "intermediate_size": rng.choice((96, 128)),
            "num_hidden_layers": rng.choice((2, 3)), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0,
                "mrope_section": [first, second, pairs - first - second],
            },
        },
        vision_config={
            "depth": rng.choice((2, 4)), "hidden_size": rng.choice((32, 64)), "intermediate_size": 48,
            "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1], "out_hidden_size": hidden,
        },
        image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN, vision_start_token_id=START_TOKEN,
        vision_end_token_id=END_TOKEN, tie_word_embeddings=rng.choice((True, False)),
    )  # fmt: skip


def _qwen3_text(rng: random.Random, **others: Any) -> dict[str, Any]:
    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 4)))
    head_dim = rng.choice((16, 32))
    pairs = head_dim // 2 if others.get("partial_rotary_factor") is None else head_dim // 4
    side = pairs // 3
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * side, side, side]}  # fmt: skip
    if others.get("partial_rotary_factor") is not None:
        rope["partial_rotary_factor"] = others["partial_rotary_factor"]
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": heads * 16, "intermediate_size": rng.choice((96, 128)),
        "num_hidden_layers": rng.choice((3, 4)), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "max_position_embeddings": 1024, "rope_parameters": rope, **others,
    }  # fmt: skip


def _qwen3_vision(rng: random.Random, text: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "depth": 3, "hidden_size": rng.choice((32, 64)), "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 36, **others,
    }  # fmt: skip


def _qwen3_config(
    name: str, text: Callable[[random.Random], dict[str, Any]], **vision: Any
) -> Callable[[random.Random], Any]:
    def make(rng: random.Random) -> Any:
        import transformers

        own = text(rng)
        return getattr(transformers, name)(
            text_config=own, vision_config=_qwen3_vision(rng, own, **vision), image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN, vision_start_token_id=START_TOKEN, vision_end_token_id=END_TOKEN,
            tie_word_embeddings=rng.choice((True, False)),
        )  # fmt: skip

    return make


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "partial_rotary_factor": 0.5,
}  # fmt: skip


def _qwen2_processor(config: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision = config.vision_config
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        size={"shortest_edge": 64, "longest_edge": 48 * 48},
    )


def _expand_grid(tensors: MediaTensors) -> tuple[list[int], tuple[int, ...]]:
    frames, rows, columns = np.asarray(tensors["image_grid_thw"]).flatten().tolist()
    return [IMAGE_TOKEN] * (frames * (rows // 2) * (columns // 2)), (frames, rows, columns)


def _mistral3(rng: random.Random) -> Any:
    from transformers import Mistral3Config

    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 4)))
    return Mistral3Config(
        text_config={
            "model_type": "mistral", "vocab_size": VOCAB_SIZE, "hidden_size": heads * 16, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
            "max_position_embeddings": 1024, "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral", "hidden_size": rng.choice((32, 64)), "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 64,
            "hidden_act": rng.choice(("gelu", "silu")),
        },
        image_token_id=IMAGE_TOKEN, spatial_merge_size=2, vision_feature_layer=-1,
        multimodal_projector_bias=rng.choice((True, False)),
    )  # fmt: skip


def _pixtral_processor(config: Any) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 48})


def _expand_rows(tensors: MediaTensors) -> tuple[list[int], tuple[int, ...]]:
    """Return rows of image tokens, each but the last with a token at its end."""
    height, width = np.asarray(tensors["image_sizes"]).flatten().tolist()
    return ([*[IMAGE_TOKEN] * (width // 8), VIDEO_TOKEN] * (height // 8))[:-1], ()


VISION_KINDS = {
    "qwen2_5_vl": VisionKind(
        "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _qwen2_processor, _expand_grid
    ),
    "mistral3": VisionKind("Mistral3ForConditionalGeneration", _mistral3, _pixtral_processor, _expand_rows),
    "qwen3_vl": VisionKind(
        "Qwen3VLForConditionalGeneration",
        _qwen3_config("Qwen3VLConfig", _qwen3_text, deepstack_visual_indexes=[0, 2]),
        _qwen2_processor,
        _expand_grid,
    ),
    "qwen3_vl_moe": VisionKind(
        "Qwen3VLMoeForConditionalGeneration",
        _qwen3_config(
            "Qwen3VLMoeConfig", lambda rng: _qwen3_text(rng, **_EXPERTS), deepstack_visual_indexes=[1]
        ),
        _qwen2_processor,
        _expand_grid,
    ),
    "qwen3_5": VisionKind(
        "Qwen3_5ForConditionalGeneration",
        _qwen3_config("Qwen3_5Config", lambda rng: _qwen3_text(rng, **_DELTA)),
        _qwen2_processor,
        _expand_grid,
    ),
    "qwen3_5_moe": VisionKind(
        "Qwen3_5MoeForConditionalGeneration",
        _qwen3_config(
            "Qwen3_5MoeConfig",
            lambda rng: _qwen3_text(rng, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=48),
        ),
        _qwen2_processor,
        _expand_grid,
    ),
}
