"""MtpLayout: how checkpoints store the heads of multi-token prediction (MTP). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import ModelConfig


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names and order of an MTP head's parts (DeepSeek-AI, DeepSeek-V3, 2024).

    A head is a decoder layer. Its input is a projection of the embedding of the next token and the hidden state of
    this one, each normalized.

    Attributes:
        layer: prefix of the decoder layer; ``{index}`` stands for the number of layers of the model.
        embedding_norm, hidden_norm, projection, final_norm: names of the other parts.
        hidden_first: the projection reads the hidden state first.
        feeds_normed: a second drafted token reads the hidden state after the final norm.
        reads_first: the embedding of the token at position 0 counts; otherwise it is replaced by zeros.
        is_dense: the layer has no experts, whatever the model's last layer has.
        prefixes: the names of all tensors of the heads begin with one of these.
        count_field: of the configuration, the number of heads.
        default_count: the number of heads if the configuration does not have the field.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    feeds_normed: bool = False
    reads_first: bool = False
    is_dense: bool = False
    prefixes: tuple[str, ...] = ()
    count_field: str = "num_nextn_predict_layers"
    default_count: int = 0


# DeepSeek-V3, GLM-4.5 and models that follow them: a layer after the last one.
_APPENDED = MtpLayout(
    layer="model.layers.{index}",
    embedding_norm="model.layers.{index}.enorm",
    hidden_norm="model.layers.{index}.hnorm",
    projection="model.layers.{index}.eh_proj",
    final_norm="model.layers.{index}.shared_head.norm",
)
_MIMO = MtpLayout(
    layer="model.mtp_layers.0",
    embedding_norm="model.mtp_layers.0.token_layernorm",
    hidden_norm="model.mtp_layers.0.hidden_layernorm",
    projection="model.mtp_layers.0.input_proj",
    final_norm="model.mtp_layers.0.final_layernorm",
    hidden_first=True,
    feeds_normed=True,
    prefixes=("model.mtp_layers.",),
)
# The norm that follows the layer is the model's own. The training code leaves position 0 as it is.
_ERNIE = MtpLayout(
    layer="model.mtp_block.0",
    embedding_norm="model.mtp_emb_norm.0",
    hidden_norm="model.mtp_hidden_norm.0",
    projection="model.mtp_linear_proj.0",
    final_norm="model.norm",
    feeds_normed=True,
    reads_first=True,
    is_dense=True,
    prefixes=("model.mtp_",),
)
# The norm after the layer is its own, and is computed before further drafts read the hidden state.
_BAILING = replace(_APPENDED, final_norm="model.layers.{index}.final_layernorm", feeds_normed=True)
# Published configurations of Qwen3-Next have no number of heads.
_QWEN_3_NEXT = MtpLayout(
    layer="mtp.layers.0",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    final_norm="mtp.norm",
    feeds_normed=True,
    reads_first=True,
    prefixes=("mtp.",),
    default_count=1,
)
_QWEN_3_5 = replace(_QWEN_3_NEXT, count_field="mtp_num_hidden_layers")
# architecture |-> layout of its heads; others have that of DeepSeek-V3.
_LAYOUTS = {
    "MiMoForCausalLM": _MIMO,
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    "BailingHybridForCausalLM": _BAILING,
    "Qwen3NextForCausalLM": _QWEN_3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5,
}


def num_mtp_heads(model: ModelConfig) -> int:
    """Return the number of heads that the checkpoint has, each for one more token."""
    layout = mtp_layout(model)
    count = model.hf.get(layout.count_field, layout.default_count)
    return count if isinstance(count, int) else 0


def mtp_layout(model: ModelConfig) -> MtpLayout:
    """Return the layout of a model's heads."""
    return _LAYOUTS.get(model.architecture, _APPENDED)


def mtp_prefixes(model: ModelConfig) -> tuple[str, ...]:
    """Return prefixes of the names of the heads' tensors; none if the model can have no heads."""
    # MiniMax-M2 has another name for them.
    count = num_mtp_heads(model) or int(model.hf.get("num_mtp_modules") or 0)
    layers = range(model.num_layers, model.num_layers + count)
    return mtp_layout(model).prefixes or tuple(f"model.layers.{index}." for index in layers)
