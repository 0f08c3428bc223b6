"""Converts a Hugging Face Llama or Qwen2 to GGUF, without a vocabulary: prompts are token ids.

llama.cpp applies RoPE to adjacent pairs in its ``llama`` architecture and to the halves of a head in ``qwen2``;
Hugging Face uses halves in both. The rows of q and k are permuted accordingly.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from safetensors.torch import load_file
from torch import Tensor

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model_dir: Path, out: Path) -> None:
    """Write the model of a directory as a GGUF file in float32."""
    config = json.loads((model_dir / "config.json").read_text())
    kind, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    writer = gguf.GGUFWriter(str(out), kind)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(theta))
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("no_vocab")
    for name, weight in sorted(load_file(model_dir / "model.safetensors").items()):
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _interleave_halves(weight, head_dim)
        writer.add_tensor(_target(name), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _target(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def _interleave_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Interleave the halves of each head: [Hq D, E] in Hugging Face's order -> llama.cpp's."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
