"""Directories of small models that read images: tokenizer, chat template, image processor and, of one, weights."""

from __future__ import annotations

import base64
import importlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# As the templates of the Qwen family write images.
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
NUM_BYTES = 256


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return an image of noise."""
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels.squeeze(), mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the content of an image's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def frames_url(frames: Sequence[Image.Image], kind: str = "PNG") -> str:
    """Return the URL of a video, in the form of vLLM."""
    texts = [base64.b64encode(file_of(each, kind)).decode() for each in frames]
    return f"data:video/{kind.lower()};base64," + ",".join(texts)


def save_tokenizer(
    folder: Path, tokens: tuple[str, ...], template: str | None = None, **named: str
) -> PreTrainedTokenizerFast:
    """Write a byte-level tokenizer: ids 0 to 255 are bytes, then the special tokens follow.

    Args:
        named: attributes of the tokenizer for some of its tokens, for example ``image_token``.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=tokens[0],
        pad_token=tokens[0],
        chat_template=template,
        extra_special_tokens=named or None,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.save_pretrained(folder)
    return tokenizer


@dataclass(frozen=True)
class ImageFamily:
    """A family of models, as its image processor sees it.

    Attributes:
        processor: class of transformers that makes prompts.
        make_image_processor: returns the image processor.
        tokens: special tokens, the first of which ends a sequence.
        image_token: receives embeddings.
        settings: of the processor.
        named: special tokens that the tokenizer has by name.
    """

    model_type: str
    processor: str
    make_image_processor: Callable[[], Any]
    tokens: tuple[str, ...]
    image_token: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


def save_processors(family: ImageFamily, folder: Path) -> int:
    """Write the files that a processor is loaded from; return the id of the image token."""
    tokenizer = save_tokenizer(folder, family.tokens, **family.named)
    family.make_image_processor().save_pretrained(folder)
    processor = {"processor_class": family.processor, **family.settings}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    return int(tokenizer.convert_tokens_to_ids(family.image_token))


def save_qwen_vl(folder: Path, seed: int = 0, max_pixels: int = 64 * 64) -> Path:
    """Write a small random Qwen2.5-VL with everything that a server reads."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = save_tokenizer(folder, QWEN_TOKENS, QWEN_TEMPLATE)
    ids = dict(zip(QWEN_TOKENS, tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": NUM_BYTES + 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 64,
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids["<|im_end|>"], tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    model = Qwen2_5_VLForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    qwen_image_processor(max_pixels).save_pretrained(folder)
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def qwen_image_processor(max_pixels: int = 64 * 64) -> Any:
    """Return the image processor of the small Qwen2.5-VL."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": max_pixels}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)


def load_family_processor(family: ImageFamily, folder: Path, *, reads_videos: bool = False) -> Any:
    """Return transformers' own processor, without that for sound, and for videos, which needs torchvision."""
    import transformers

    kind = getattr(transformers, family.processor)
    if getattr(kind, "is_dummy", False):
        folder_name = family.processor.removesuffix("Processor").lower()
        module = importlib.import_module(f"transformers.models.{folder_name}.processing_{folder_name}")
        kind = getattr(module, family.processor)

    def check(self: Any, name: str, value: Any) -> Any:
        return None if value is None else kind.check_argument_for_proper_class(self, name, value)

    alone = type(family.processor, (kind,), {"check_argument_for_proper_class": check})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = {"image_processor": family.make_image_processor(), "tokenizer": tokenizer}
    if reads_videos:
        parts["video_processor"] = transformers.AutoVideoProcessor.from_pretrained(folder)
    return alone(**{name: parts.get(name) for name in kind.get_attributes()}, **family.settings)
