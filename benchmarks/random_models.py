"""Random-weight models for benchmarks, with a tokenizer."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

from quire.cluster.config.engine_options import DEMO_VISION_PATH

TOKENIZER_LEN = 32000

COMMON: dict[str, Any] = {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None}
# s: a Llama of 60 million parameters; m: the shape of Qwen2.5-0.5B; k: as s, with 32 KB of KV per token, for
# prompts of 16,000 tokens; see also `make_vision_model`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "s": (
        "Llama",
        {
            "vocab_size": TOKENIZER_LEN, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "m": (
        "Qwen2",
        {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "k": (
        "Llama",
        {
            "vocab_size": TOKENIZER_LEN, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False, "max_position_embeddings": 16384,
        },
    ),
}  # fmt: skip


def make_model(folder: Path, kind: str) -> None:
    """Write one of MODELS in float32, with a tokenizer.

    Projections keep the variance of their inputs, and q, k and the LM head are scaled by 2: with the usual small
    weights a random model repeats one token.
    """
    import torch
    import transformers

    family, sizes = MODELS[kind]
    config = getattr(transformers, f"{family}Config")(**COMMON | sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    gains = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 2.0}
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            layer = name.split(".")[-2]
            if weight.ndim == 2:
                std = 0.05 if layer == "embed_tokens" else gains.get(layer, 1.0) * weight.shape[1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_vision_model(folder: Path) -> None:
    """Write a Qwen2.5-VL of 15 million parameters, 3 of them in its encoder, in float32, with all that serves images.

    As in the published models a patch has 14 by 14 pixels, and one token stands for 28 by 28: an image of 1024 by
    1024 is 1,369 tokens.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    names = (
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(list(names)), strict=True))
    tokenizer.chat_template = (DEMO_VISION_PATH / "chat_template.jinja").read_text()
    text = {
        "vocab_size": TOKENIZER_LEN + 64, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 4, "hidden_size": 256, "intermediate_size": 768, "num_heads": 4, "out_hidden_size": 256,
        "fullatt_block_indexes": [3],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer whose other tokens are artificial words of two to four letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    pairs = list(itertools.product(letters, letters))
    words = pairs + [("".join(pair), letter) for pair in pairs for letter in letters]
    words += [("".join(left), "".join(right)) for left in pairs for right in pairs]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = words[: TOKENIZER_LEN - len(alphabet)]
    vocab = {token: index for index, token in enumerate([*alphabet, *map("".join, words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=words))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The last words of the vocabulary, which occur in no prompt.
    special = dict(zip(("bos_token", "eos_token", "pad_token"), map("".join, words[-3:]), strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
