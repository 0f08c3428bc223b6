"""Small random models that read images, prompts with images for them, and their greedy tokens by transformers."""

from __future__ import annotations

import hashlib
import importlib
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
        expand: tensors of one image |-> its tokens, and the grid of a MediaItem; None for as many image tokens as
            transformers has embeddings.
    """

    architecture: str
    make_config: Callable[[random.Random], Any]
    make_processor: Callable[[Any], Any]
    expand: Callable[[MediaTensors], tuple[list[int], tuple[int, ...]]] | None = None


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
    reference: VisionReference,
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
        expanded, grid = (reference.expand if kind.expand is None else kind.expand)(own)
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

    def num_encoder_parameters(self, prompt: VisionPrompt) -> int:
        """Return the number of parameters that the embeddings of a prompt's images depend on."""
        torch.cat([each.flatten() for each in self.encode(prompt)]).sum().backward()
        found = int(sum(each.numel() for each in self.model.parameters() if each.grad is not None))
        self.model.zero_grad(set_to_none=True)
        return found

    def encode(self, prompt: VisionPrompt) -> list[torch.Tensor]:
        """Return the embeddings of each image of a prompt, with their deep features beside them."""
        output = self.model.model.get_image_features(**prompt.arguments)
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

    @torch.inference_mode()
    def expand(self, tensors: MediaTensors) -> tuple[list[int], tuple[int, ...]]:
        """Return as many image tokens as one image has embeddings."""
        arguments = {name: torch.from_numpy(each.copy()) for name, each in tensors.items()}
        found = self.encode(VisionPrompt([], (), {}, arguments))
        return [IMAGE_TOKEN] * sum(map(len, found)), ()

    @torch.inference_mode()
    def check_greedy(self, prompt: VisionPrompt, generated: Sequence[int], tie: float = 3e-4) -> None:
        """Assert that each token is the most likely one after its prefix, up to near-ties."""
        ids = torch.tensor([prompt.token_ids + list(generated)])
        arguments = dict(prompt.arguments)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inspect.signature(self.model.model.forward).parameters:
                arguments[name] = (ids == IMAGE_TOKEN).int()
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
        vision_config=_pixtral_vision(rng), image_token_id=IMAGE_TOKEN, spatial_merge_size=2, vision_feature_layer=-1,
        multimodal_projector_bias=rng.choice((True, False)),
    )  # fmt: skip


def _pixtral(rng: random.Random) -> Any:
    from transformers import LlavaConfig

    text = _chosen_text(rng, "mistral")
    return LlavaConfig(
        text_config=text, vision_config=_pixtral_vision(rng), image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=1,
        multimodal_projector_bias=rng.choice((True, False)), tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


def _pixtral_vision(rng: random.Random) -> dict[str, Any]:
    return {
        "model_type": "pixtral", "hidden_size": rng.choice((32, 64)), "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 64,
        "hidden_act": rng.choice(("gelu", "silu")),
    }  # fmt: skip


def _pixtral_processor(config: Any) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 48})


def _expand_rows(tensors: MediaTensors) -> tuple[list[int], tuple[int, ...]]:
    """Return rows of image tokens, each but the last with a token at its end."""
    height, width = np.asarray(tensors["image_sizes"]).flatten().tolist()
    return ([*[IMAGE_TOKEN] * (width // 8), VIDEO_TOKEN] * (height // 8))[:-1], ()


_SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False}


def _vit_vision(rng: random.Random, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": rng.choice((32, 64)), "intermediate_size": 48, "num_hidden_layers": rng.choice((2, 3)),
        "num_attention_heads": 2, "patch_size": 4, "image_size": 32,
        "hidden_act": rng.choice(("gelu", "gelu_pytorch_tanh")), **others,
    }  # fmt: skip


def _chosen_text(rng: random.Random, *types: str) -> dict[str, Any]:
    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 4)))
    return {
        "model_type": rng.choice(types), "vocab_size": VOCAB_SIZE, "hidden_size": heads * 16,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 16, "max_position_embeddings": 1024, "pad_token_id": 3,
        "sliding_window": None, "tie_word_embeddings": rng.choice((True, False)),
    }  # fmt: skip


def _llava(name: str, *encoders: str, **settings: Any) -> Callable[[random.Random], Any]:
    def make(rng: random.Random) -> Any:
        import transformers

        encoder = rng.choice(encoders)
        vision = _vit_vision(rng, model_type=encoder, vision_use_head=False)
        if encoder == "clip_vision_model":
            vision["hidden_act"] = "quick_gelu"
            own = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
        else:
            own = {"vision_feature_layer": rng.choice((-1, -2)), "vision_feature_select_strategy": "full"}
        text = _chosen_text(rng, "llama", "mistral", "qwen2")
        return getattr(transformers, name)(
            text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, video_token_index=VIDEO_TOKEN,
            multimodal_projector_bias=rng.choice((True, False)), tie_word_embeddings=text["tie_word_embeddings"],
            **own, **settings,
        )  # fmt: skip

    return make


def _glm4v(name: str, *text_types: str) -> Callable[[random.Random], Any]:
    def make(rng: random.Random) -> Any:
        import transformers

        text = _chosen_text(rng, *text_types)
        side = rng.choice((1, 2))
        text |= {
            "head_dim": 16, "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [side, 2 - side // 2, 2 - side + side // 2],
            },
        }  # fmt: skip
        if text["model_type"] == "glm4v_moe_text":
            text |= {
                "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1,
                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            }  # fmt: skip
        vision = {
            "depth": 2, "hidden_size": rng.choice((32, 64)), "intermediate_size": 48, "num_heads": 2,
            "patch_size": 4, "image_size": 32, "out_hidden_size": text["hidden_size"], "spatial_merge_size": 2,
            "attention_bias": rng.choice((True, False)),
        }  # fmt: skip
        return getattr(transformers, name)(
            text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN,
            image_start_token_id=START_TOKEN, image_end_token_id=END_TOKEN,
            tie_word_embeddings=text["tie_word_embeddings"],
        )  # fmt: skip

    return make


_TILES = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]}


def _internvl(rng: random.Random) -> Any:
    from transformers import InternVLConfig

    text = _chosen_text(rng, "qwen2", "qwen3")
    vision = _vit_vision(
        rng, model_type="internvl_vision", patch_size=[4, 4], image_size=[32, 32], layer_scale_init_value=0.5,
        attention_bias=rng.choice((True, False)), use_qk_norm=rng.choice((True, False)),
        norm_type=rng.choice(("layer_norm", "rms_norm")), use_mean_pooling=rng.choice((True, False)),
    )  # fmt: skip
    return InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, downsample_ratio=0.5,
        tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


def _idefics3(name: str) -> Callable[[random.Random], Any]:
    def make(rng: random.Random) -> Any:
        import transformers

        text = _chosen_text(rng, "llama")
        return getattr(transformers, name)(
            text_config=text, vision_config=_vit_vision(rng, image_size=rng.choice((32, 40))), scale_factor=2,
            image_token_id=IMAGE_TOKEN, pad_token_id=3, tie_word_embeddings=text["tie_word_embeddings"],
        )  # fmt: skip

    return make


def _image_processor(folder: str, name: str, **settings: Any) -> Callable[[Any], Any]:
    def make(config: Any) -> Any:
        module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
        return getattr(module, name)(**settings)

    return make


_glm4v_processor = _image_processor(
    "glm4v", "Glm4vImageProcessorPil", patch_size=4, size={"shortest_edge": 64, "longest_edge": 2 * 48 * 48}
)
_SQUARE = {"height": 32, "width": 32}
_CLIP_PROCESSOR = _image_processor(
    "clip", "CLIPImageProcessorPil", size={"shortest_edge": 32}, crop_size=_SQUARE
)
_INTERNVL_PROCESSOR = _image_processor(
    "got_ocr2", "GotOcr2ImageProcessorPil", size=_SQUARE, crop_to_patches=True, max_patches=4
)


def _gemma_text(rng: random.Random, **others: Any) -> dict[str, Any]:
    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 4)))
    return {
        "vocab_size": VOCAB_SIZE, "hidden_size": heads * 16, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
        "max_position_embeddings": 1024, "sliding_window": rng.choice((6, 12, 40)), "pad_token_id": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **others,
    }  # fmt: skip


def _gemma3(rng: random.Random) -> Any:
    from transformers import Gemma3Config

    return Gemma3Config(
        text_config=_gemma_text(rng, query_pre_attn_scalar=16), vision_config=_vit_vision(rng, **_SIGLIP),
        mm_tokens_per_image=16, image_token_id=IMAGE_TOKEN, boi_token_index=START_TOKEN,
        eoi_token_index=END_TOKEN, tie_word_embeddings=True,
    )  # fmt: skip


def _gemma4(rng: random.Random) -> Any:
    from transformers import Gemma4Config

    inputs, attends = rng.choice(((8, None), (0, "vision"), (8, "vision")))
    return Gemma4Config(
        text_config=_gemma_text(
            rng, global_head_dim=32, hidden_size_per_layer_input=inputs, vocab_size_per_layer_input=VOCAB_SIZE,
            num_kv_shared_layers=0, use_bidirectional_attention=attends,
        ),
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 80,
            "pooling_kernel_size": rng.choice((2, 3)), "use_clipped_linears": rng.choice((True, False)),
            "standardize": rng.choice((True, False)),
        },
        audio_config=None, image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN, boi_token_id=START_TOKEN,
        eoi_token_id=END_TOKEN, tie_word_embeddings=True,
    )  # fmt: skip


def _gemma3_processor(config: Any) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    side = config.vision_config.image_size
    return Gemma3ImageProcessorPil(size={"height": side, "width": side})


def _gemma4_processor(config: Any) -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    vision = config.vision_config
    return Gemma4ImageProcessorPil(
        patch_size=vision.patch_size, pooling_kernel_size=vision.pooling_kernel_size, max_soft_tokens=70
    )


def _expand_fixed(number: int) -> Callable[[MediaTensors], tuple[list[int], tuple[int, ...]]]:
    return lambda tensors: ([IMAGE_TOKEN] * number, ())


def _expand_counted(tensors: MediaTensors) -> tuple[list[int], tuple[int, ...]]:
    return [IMAGE_TOKEN] * int(np.asarray(tensors["num_soft_tokens_per_image"])[0]), ()


VISION_KINDS = {
    "llava": VisionKind(
        "LlavaForConditionalGeneration",
        _llava("LlavaConfig", "clip_vision_model", "siglip_vision_model"),
        _CLIP_PROCESSOR,
    ),
    "glm4v": VisionKind(
        "Glm4vForConditionalGeneration",
        _glm4v("Glm4vConfig", "glm4v_text"),
        _glm4v_processor,
        _expand_grid,
    ),
    "glm4v_moe": VisionKind(
        "Glm4vMoeForConditionalGeneration",
        _glm4v("Glm4vMoeConfig", "glm4v_moe_text"),
        _glm4v_processor,
        _expand_grid,
    ),
    "glm46v": VisionKind(
        "Glm46VForConditionalGeneration",
        _glm4v("Glm46VConfig", "glm4v_text", "glm4v_moe_text"),
        _glm4v_processor,
        _expand_grid,
    ),
    "glm_ocr": VisionKind(
        "GlmOcrForConditionalGeneration",
        _glm4v("GlmOcrConfig", "glm_ocr_text"),
        _glm4v_processor,
        _expand_grid,
    ),
    "pixtral": VisionKind("LlavaForConditionalGeneration", _pixtral, _pixtral_processor),
    "llava_next": VisionKind(
        "LlavaNextForConditionalGeneration",
        _llava("LlavaNextConfig", "clip_vision_model", **_TILES),
        _image_processor(
            "llava_next",
            "LlavaNextImageProcessorPil",
            size={"shortest_edge": 32},
            crop_size=_SQUARE,
            **_TILES,
        ),
    ),
    "llava_onevision": VisionKind(
        "LlavaOnevisionForConditionalGeneration",
        _llava("LlavaOnevisionConfig", "siglip_vision_model", vision_aspect_ratio="anyres_max_2", **_TILES),
        _image_processor("llava_onevision", "LlavaOnevisionImageProcessorPil", size=_SQUARE, **_TILES),
    ),
    "internvl": VisionKind("InternVLForConditionalGeneration", _internvl, _INTERNVL_PROCESSOR),
    "idefics3": VisionKind(
        "Idefics3ForConditionalGeneration",
        _idefics3("Idefics3Config"),
        _image_processor(
            "idefics3",
            "Idefics3ImageProcessorPil",
            size={"longest_edge": 64},
            max_image_size={"longest_edge": 32},
        ),
    ),
    "smolvlm": VisionKind(
        "SmolVLMForConditionalGeneration",
        _idefics3("SmolVLMConfig"),
        _image_processor(
            "smolvlm",
            "SmolVLMImageProcessorPil",
            size={"longest_edge": 64},
            max_image_size={"longest_edge": 32},
        ),
    ),
    "gemma3": VisionKind("Gemma3ForConditionalGeneration", _gemma3, _gemma3_processor, _expand_fixed(16)),
    "gemma4": VisionKind("Gemma4ForConditionalGeneration", _gemma4, _gemma4_processor, _expand_counted),
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
