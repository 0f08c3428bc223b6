"""VISION_KINDS: the families that read images, with their random configurations, processors and tokens."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from vision_models import (
    END_TOKEN,
    IMAGE_TOKEN,
    START_TOKEN,
    VIDEO_TOKEN,
    VOCAB_SIZE,
    VisionKind,
)

from quire.proto.media import MediaTensors


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


def _qwen4_text(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((3, 4))
    return _qwen3_text(rng, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=48) | {
        "hc_count": rng.choice((2, 3)), "hc_lowrank": 12, "indexer_n_heads": 16, "indexer_kv_heads": 1,
        "indexer_head_dim": 32, "indexer_budget": 3 * length, "indexer_compress_ratio": length,
        "output_gate_type": "sigmoid", "ple_layer_ids": [rng.choice((1, 3))], "ple_embed_dim": 40, "ngram_size": 3,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 60, "split_ngram_parts": 4, "eos_token_id": 1,
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


def _mistral_large4(rng: random.Random) -> Any:
    from transformers import MistralLarge4Config

    heads, rope_dim = rng.choice((4, 8)), rng.choice((8, 16))
    sources, indexers = rng.choice(
        (
            ([0, 0, 2, 0, 2, 0], ["full", "shared", "full", "full", "shared", "full"]),
            ([0, 1, 2, 0, 1, 5], ["full", "full", "shared", "full", "full", "shared"]),
        )
    )
    # A layer shares the latents of one that has positions as itself.
    rotated = [int(source in (0, 3)) for source in sources]
    return MistralLarge4Config(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": rng.choice((64, 80)), "intermediate_size": 96,
            "num_hidden_layers": 6, "num_attention_heads": heads, "num_key_value_heads": heads,
            "kv_lora_rank": rng.choice((24, 32)), "qk_rope_head_dim": rope_dim,
            "qk_nope_head_dim": rng.choice((8, 16)), "v_head_dim": rng.choice((8, 16)),
            "max_position_embeddings": 1024, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": rng.choice((1.0, 2.5)),
            "index_topk": rng.choice((6, 12, 20)), "index_head_dim": rng.choice((16, 32)), "index_n_heads": 16,
            "indexer_types": indexers, "kv_source_layers": sources, "no_rope_layers": rotated,
            "first_k_dense_replace": rng.choice((0, 1)), "final_logit_softcapping": rng.choice((3.0, 30.0)),
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 32,
                "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
            },
        },
        vision_config=_pixtral_vision(rng), image_token_index=IMAGE_TOKEN, spatial_merge_size=2,
        projector_hidden_act="gelu", multimodal_projector_bias=False,
    )  # fmt: skip


def _minimax_m3(rng: random.Random) -> Any:
    from transformers import MiniMaxM3VLConfig

    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 2)))
    kinds = [
        "full_attention",
        "minimax_m3_sparse",
        "minimax_m3_sparse",
        "full_attention",
        "minimax_m3_sparse",
    ]
    return MiniMaxM3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": rng.choice((64, 80)), "intermediate_size": 40,
            "dense_intermediate_size": 96, "shared_intermediate_size": 48, "num_hidden_layers": 5,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": rng.choice((16, 24)),
            "max_position_embeddings": 1024, "num_local_experts": 6, "num_experts_per_tok": 2,
            "routed_scaling_factor": rng.choice((1.0, 2.0)), "index_n_heads": kv_heads,
            "index_head_dim": rng.choice((16, 32)), "index_block_size": 16, "index_topk_blocks": rng.choice((2, 3)),
            "index_local_blocks": rng.choice((0, 1, 2)), "swiglu_limit": rng.choice((0.5, 7.0)),
            "layer_types": kinds, "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
            "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            },
        },
        vision_config={
            "hidden_size": rng.choice((40, 64)), "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 4,
        },
        projector_hidden_size=40, image_token_index=IMAGE_TOKEN, video_token_index=VIDEO_TOKEN,
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


def _glm5_next(rng: random.Random) -> Any:
    from transformers import Glm5NextConfig

    heads, pool_len = rng.choice((4, 8)), rng.choice((2, 4, 8))
    kinds, indexers = rng.choice(
        (
            (["linear_attention", "indexed_attention", "indexed_attention"], ["full", "full", "shared"]),
            (["indexed_attention", "linear_attention", "indexed_attention"], ["full", "full", "full"]),
        )
    )
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": rng.choice((64, 80)), "intermediate_size": 96, "pad_token_id": 3,
        "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": heads,
        "kv_lora_rank": rng.choice((32, 48)), "q_lora_rank": rng.choice((24, 32)), "v_head_dim": 16,
        "qk_nope_head_dim": rng.choice((16, 24)), "max_position_embeddings": 1024, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 40, "layer_types": kinds, "indexer_types": indexers,
        "mlp_layer_types": rng.choice((["dense", "sparse", "sparse"], ["sparse"] * 3)), "index_kpool": pool_len,
        "index_topk": pool_len * rng.choice((1, 2, 4)), "index_head_dim": rng.choice((16, 32)), "index_n_heads": 16,
        "linear_head_dim": rng.choice((16, 24)), "linear_num_heads": rng.choice((4, 8)), "n_shared_experts": 1,
        "linear_lower_bound": rng.choice((None, -5.0)), "hc_mult": rng.choice((2, 4)), "hc_sinkhorn_iters": 4,
        "swiglu_limit": rng.choice((0.5, 10.0)), "routed_scaling_factor": rng.choice((1.0, 2.5)),
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": rng.choice((32, 64)), "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "image_size": 32, "out_hidden_size": text["hidden_size"], "spatial_merge_size": 2,
        "projection_intermediate_size": rng.choice((40, 56)), "swiglu_limit": rng.choice((0.05, 10.0)),
        "attention_bias": rng.choice((True, False)),
    }  # fmt: skip
    return Glm5NextConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN, video_token_id=IMAGE_TOKEN,
        image_start_token_id=START_TOKEN, image_end_token_id=END_TOKEN, video_start_token_id=VIDEO_TOKEN,
        video_end_token_id=VIDEO_TOKEN + 1, tie_word_embeddings=rng.choice((True, False)),
    )  # fmt: skip


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


def _paddleocr_vl(rng: random.Random) -> Any:
    from transformers import PaddleOCRVLConfig

    text = _chosen_text(rng, "paddleocr_vl_text")
    first = rng.randrange(1, 6)
    second = rng.randrange(1, 8 - first)
    text |= {
        "use_bias": rng.choice((True, False)),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [first, second, 8 - first - second]
        },
    }  # fmt: skip
    return PaddleOCRVLConfig(
        text_config=text, vision_config=_vit_vision(rng), image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START_TOKEN, vision_end_token_id=END_TOKEN,
        tie_word_embeddings=text["tie_word_embeddings"],
    )  # fmt: skip


_paddleocr_vl_processor = _image_processor(
    "paddleocr_vl",
    "PaddleOCRVLImageProcessorPil",
    patch_size=4,
    size={"shortest_edge": 64, "longest_edge": 48 * 48},
)


def _llama4(rng: random.Random) -> Any:
    from transformers import Llama4Config

    size = rng.choice((32, 64))
    adapted = rng.choice((40, 48))
    text = _chosen_text(rng, "llama4_text")
    text |= {
        "intermediate_size_mlp": 80, "num_local_experts": rng.choice((2, 4)), "moe_layers": [rng.choice((0, 1))],
        "attention_chunk_size": rng.choice((24, 512)), "no_rope_layers": rng.choice(([0, 1], [1, 0], [1, 1])),
        "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {
        "hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 4, "projector_input_dim": adapted, "projector_output_dim": adapted,
        "vision_output_dim": adapted,
    }  # fmt: skip
    return Llama4Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, boi_token_index=START_TOKEN,
        eoi_token_index=END_TOKEN, tie_word_embeddings=False,
    )  # fmt: skip


def _llama4_processor(config: Any) -> Any:
    """Return tiles and a small image in the form of Llama 4's processor, which needs torchvision."""
    side = config.vision_config.image_size

    def process(image: Image.Image, return_tensors: str) -> dict[str, np.ndarray]:
        columns, rows = (min(3, max(1, round(length / side))) for length in image.size)
        whole = _pixels(image.resize((columns * side, rows * side)))
        tiles = (
            whole.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        )
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, _pixels(image.resize((side, side)))[None]))
        return {"pixel_values": tiles}

    return process


def _pixels(image: Image.Image) -> np.ndarray:
    """Return an image as numbers from -1 to 1, [3, H, W]."""
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1


def _kimi_k25(rng: random.Random) -> Any:
    from transformers import AutoConfig

    size, heads = rng.choice((32, 64)), rng.choice((4, 8))
    return AutoConfig.for_model(
        "kimi_k25",
        text_config={
            "model_type": "deepseek_v3", "vocab_size": VOCAB_SIZE, "hidden_size": heads * 16,
            "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": heads, "num_key_value_heads": heads, "n_routed_experts": 4, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
            "q_lora_rank": rng.choice((24, 32)), "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "max_position_embeddings": 1024, "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": size, "intermediate_size": 48, "num_hidden_layers": rng.choice((2, 3)),
            "num_attention_heads": 2, "pos_emb_height": 8, "pos_emb_width": 8, "patch_size": 4,
        },
        projection_hidden_size=size, image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START_TOKEN, vision_end_token_id=END_TOKEN, tie_word_embeddings=False,
    )  # fmt: skip


def _kimi_k25_processor(config: Any) -> Any:
    """Return patches of a padded image in the form of Kimi K2.5's processor, which needs torchvision."""
    side = config.vision_config.patch_size

    def process(image: Image.Image, return_tensors: str) -> dict[str, np.ndarray]:
        width, height = image.size
        pixels = np.pad(_pixels(image), [(0, 0), (0, -height % (2 * side)), (0, -width % (2 * side))])
        rows, columns = (length // side for length in pixels.shape[1:])
        patches = pixels.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        return {
            "pixel_values": patches.reshape(-1, 3, side, side),
            "image_grid_thw": np.array([[1, rows, columns]]),
        }

    return process


def _deepseek_ocr2(rng: random.Random) -> Any:
    from transformers import DeepseekOcr2Config

    text = _chosen_text(rng, "deepseek_ocr2_text")
    text |= {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "mlp_layer_types": rng.choice((["dense", "sparse"], ["sparse", "sparse"])), "tie_word_embeddings": False,
    } | rng.choice(({}, {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}))  # fmt: skip
    size, (heads, kv_heads) = rng.choice((32, 64)), rng.choice(((4, 2), (2, 2)))
    return DeepseekOcr2Config(
        text_config=text,
        vision_config={
            "sam_config": {
                "hidden_size": rng.choice((32, 64)), "output_channels": 16, "num_hidden_layers": 3,
                "num_attention_heads": 2, "image_size": 32, "patch_size": 4, "window_size": rng.choice((3, 4)),
                "global_attn_indexes": [rng.choice((1, 2))], "mlp_ratio": 2.0, "qkv_bias": rng.choice((True, False)),
                "downsample_channels": [24, size],
            },
            "encoder_config": {
                "hidden_size": size, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            },
        },
        image_token_id=IMAGE_TOKEN,
    )  # fmt: skip


def _step3p7(rng: random.Random) -> Any:
    from transformers import Step3p7Config

    text = _chosen_text(rng, "step3p5")
    del text["tie_word_embeddings"]
    text |= {
        "num_hidden_layers": 3, "num_sliding_attention_heads": 2 * text["num_attention_heads"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": rng.choice((6, 12, 40)),
        "rope_theta": [5000.0, 10000.0, 5000.0], "partial_rotary_factors": [0.5, 1.0, 0.5],
        "swiglu_limits": rng.choice((None, [0.0, 0.01, 0.0])), "n_routed_experts": 4, "num_experts_per_tok": 2,
        "swiglu_limits_shared": rng.choice((None, [0.05, 0.0, 0.1])), "share_expert_dim": 48,
        "moe_intermediate_size": 32, "moe_router_scaling_factor": rng.choice((1.0, 3.0)),
    }  # fmt: skip
    vision = {
        "hidden_size": rng.choice((32, 64)), "num_hidden_layers": rng.choice((2, 3)), "num_attention_heads": 2,
        "image_size": 48, "patch_size": 4, "mlp_ratio": 1.5, "layer_scale_init_value": 0.5,
    }  # fmt: skip
    return Step3p7Config(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        projector_bias=rng.choice((True, False)),
    )


def _step3p7_processor(config: Any) -> Any:
    """Return tiles and the whole in the form of Step 3.7's processor, which needs torchvision."""
    side = config.vision_config.image_size

    def process(image: Image.Image, return_tensors: str) -> dict[str, np.ndarray]:
        count = min(3, max(image.size) // side)
        tiles = [_pixels(image.resize((32, 32), box=(0, 0, 8 + index, 8))) for index in range(count)]
        local = {"pixel_values_local": np.stack(tiles)} if tiles else {}
        whole = _pixels(image.resize((side, side)))[None]
        return {"pixel_values": whole, "num_local_patches": np.array([count]), **local}

    return process


def _muse_spark(rng: random.Random) -> Any:
    from transformers import MuseSparkConfig

    heads, kv_heads = rng.choice(((4, 2), (4, 4), (8, 4)))
    size, hidden, num_layers = rng.choice((32, 64)), heads * 16, rng.choice((3, 4))
    text = {
        "vocab_size": VOCAB_SIZE, "hidden_size": hidden, "intermediate_size": 96, "num_hidden_layers": num_layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": rng.choice((16, 32)),
        "max_position_embeddings": 1024, "sliding_window": rng.choice((6, 12, 40)), "eos_token_id": 1,
        "bos_token_id": 2, "num_local_experts": rng.choice((4, 6)), "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "moe_hidden_size": rng.choice((32, 48)), "output_multiplier": 0.5,
        "mlp_layer_types": ["sparse", "dense", *["sparse"] * (num_layers - 2)],
        "qk_scale_factor": rng.choice((1.0, 2.5)), "routed_scaling_factor": rng.choice((1.0, 2.5)),
    }  # fmt: skip
    vision = {
        "hidden_size": size, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "patch_size": 4, "pos_emb_height": (side := rng.choice((3, 5))), "pos_emb_width": side,
        "max_position_embeddings": side**2, "layer_types": ["window_attention", "full_attention", "window_attention"],
    }  # fmt: skip
    audio = {"patch_sizes": [2], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1}
    return MuseSparkConfig(
        text_config=text, vision_config=vision, audio_config=audio | {"out_hidden_size": hidden},
        image_token_id=IMAGE_TOKEN, video_token_id=VIDEO_TOKEN, audio_token_id=VIDEO_TOKEN, out_hidden_size=4 * size,
        projector_hidden_size=rng.choice((40, 56)),
    )  # fmt: skip


def _muse_spark_processor(config: Any) -> Any:
    """Return patches of an image in the form of Muse Spark's processor, which needs torchvision."""
    side = config.vision_config.patch_size

    def process(image: Image.Image, return_tensors: str) -> dict[str, np.ndarray]:
        columns, rows = (2 * max(1, round(length / (2 * side))) for length in image.size)
        pixels = _pixels(image.resize((columns * side, rows * side)))
        patches = pixels.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        patches = patches.reshape(rows * columns, -1)
        return {"pixel_values": np.tile(patches, 2), "image_grid_thw": np.array([[1, rows, columns]])}

    return process


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


def _paligemma(rng: random.Random) -> Any:
    from transformers import PaliGemmaConfig

    text = _gemma_text(rng, model_type=(kind := rng.choice(("gemma2", "gemma", "gemma2"))))
    del text["sliding_window"], text["layer_types"]
    if kind == "gemma2":
        text |= {"sliding_window": 20, "query_pre_attn_scalar": 16}
    return PaliGemmaConfig(
        text_config=text, vision_config=_vit_vision(rng, **_SIGLIP), image_token_index=IMAGE_TOKEN,
        projection_dim=text["hidden_size"], hidden_size=text["hidden_size"], vocab_size=VOCAB_SIZE,
    )  # fmt: skip


def _paligemma_processor(config: Any) -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    side = config.vision_config.image_size
    return SiglipImageProcessorPil(size={"height": side, "width": side})


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
    "glm5_next": VisionKind(
        "Glm5NextForConditionalGeneration",
        _glm5_next,
        _image_processor(
            "glm5_next",
            "Glm5NextImageProcessorPil",
            patch_size=4,
            min_image_tokens=4,
            max_image_tokens=36,
        ),
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
    "paddleocr_vl": VisionKind(
        "PaddleOCRVLForConditionalGeneration", _paddleocr_vl, _paddleocr_vl_processor, _expand_grid
    ),
    "deepseek_ocr2": VisionKind(
        "DeepseekOcr2ForConditionalGeneration",
        _deepseek_ocr2,
        _image_processor(
            "deepseek_ocr2",
            "DeepseekOcr2ImageProcessorPil",
            size=_SQUARE,
            tile_size=72,
            max_patches=2,
        ),
        unreached=("query_1024_resolution",),
    ),
    "step3p7": VisionKind("Step3p7ForConditionalGeneration", _step3p7, _step3p7_processor),
    "muse_spark": VisionKind("MuseSparkForConditionalGeneration", _muse_spark, _muse_spark_processor),
    "llama4": VisionKind("Llama4ForConditionalGeneration", _llama4, _llama4_processor),
    "kimi_k25": VisionKind(
        "Kimi_K25ForConditionalGeneration",
        _kimi_k25,
        _kimi_k25_processor,
        names=(
            ("language_model.model.blocks.", "language_model.model.layers."),
            ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
            ("model.mm_projector.", "mm_projector."),
        ),
    ),
    "gemma3": VisionKind("Gemma3ForConditionalGeneration", _gemma3, _gemma3_processor, _expand_fixed(16)),
    "paligemma": VisionKind(
        "PaliGemmaForConditionalGeneration", _paligemma, _paligemma_processor, sees_whole_prompt=True
    ),
    "gemma4": VisionKind("Gemma4ForConditionalGeneration", _gemma4, _gemma4_processor, _expand_counted),
    "qwen2_5_vl": VisionKind(
        "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _qwen2_processor, _expand_grid
    ),
    "mistral3": VisionKind("Mistral3ForConditionalGeneration", _mistral3, _pixtral_processor, _expand_rows),
    "mistral_large4": VisionKind(
        "MistralLarge4ForConditionalGeneration", _mistral_large4, _pixtral_processor, _expand_rows
    ),
    "minimax_m3": VisionKind(
        "MiniMaxM3SparseForConditionalGeneration", _minimax_m3, _qwen2_processor, _expand_grid
    ),
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
    "qwen4_exp": VisionKind(
        "Qwen4ExpForConditionalGeneration",
        _qwen3_config("Qwen4ExpConfig", _qwen4_text),
        _qwen2_processor,
        _expand_grid,
    ),
}
