"""Eagle3Head: a draft head of one decoder layer (Li et al., EAGLE-3, 2025), as checkpoints are published."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.draft_chain import DraftNetwork, HiddenInput
from ....kernels.linear import PackedWeight, pack
from ....kernels.norm import add_rms_norm, rms_norm
from ....proto.config import ModelConfig
from ....proto.errors import ConfigError, ModelLoadError
from ....proto.model.attention import AttentionSpec
from ....proto.model.eagle3_config import aux_layers
from ....proto.model.read_spec import read_spec
from ....proto.model.registry import FAMILIES
from ...attention import AttentionInputs, LayerCache
from ...weights.linear_weight import LinearWeight, PlainWeight, packed_weight
from ...weights.weight_slice import WeightSlice
from ..layers import PartialSum, RotaryTable, Rotations
from ..llama.decoder import Decoder
from ..llama.decoder_layer import make_dense_layer
from ..load_context import LoadContext
from ..mixers.attention import Attention
from ..mlp import Mlp
from ..vocab_parallel import VocabParallelEmbedding, VocabParallelHead


class Eagle3Head:
    """One rank of the head; implements `draft_head.DraftHead`.

    The layer reads the embedding of a token beside the hidden state. The head shares the embedding of the target
    model unless it has its own, and the output layer if it has none. Its own output layer may be of a part of the
    vocabulary: ``d2t`` holds the difference between the target's token ids and the head's.

    Raises:
        ConfigError: the configuration is not that of a head for the target model.
        ModelLoadError: the weights cannot be read, or have other shapes.
    """

    def __init__(self, load: LoadContext, config: ModelConfig, target: Decoder) -> None:
        spec = read_spec(config, FAMILIES["LlamaForCausalLM"])
        num_aux = len(aux_layers(config, target.num_layers))
        self.comm, self.vocab_size = load.comm, config.vocab_size
        self.norm_eps = spec.norm_eps
        self.is_normed_residual = bool(config.hf.get("norm_before_residual"))
        root = "model." if load.checkpoint.has("model.fc.weight") else ""
        name = root + (
            "midlayer" if load.checkpoint.has(f"{root}midlayer.hidden_norm.weight") else "layers.0"
        )
        size, num_features = spec.hidden_size, num_aux * target.hidden_size
        self.hidden_size, self.num_features = size, num_features
        has_embedding = load.checkpoint.has(f"{root}embed_tokens.weight")
        if not has_embedding and size != target.hidden_size:
            raise ConfigError(
                f"speculative_config: model {config.name} has a hidden_size of {size} and no embedding, so it must "
                f"have that of the target model, {target.hidden_size}"
            )
        (self.rope_key,) = spec.ropes
        self.rotary = RotaryTable(load, spec.ropes[self.rope_key], config.max_model_len)
        self.fc = load.linear([WeightSlice(f"{root}fc", (size, num_features), 0, 0, size)])
        # Of the target model's hidden states side by side.
        self.features_norm: Tensor | None = None
        if config.hf.get("norm_before_fc"):
            self.features_norm = load.norm(f"{root}input_norm", num_features)
        self.embedding = target.embedding
        if has_embedding:
            self.embedding = VocabParallelEmbedding(load, f"{root}embed_tokens", spec.vocab_size, size)
        self.embedding_norm, self.hidden_norm, self.mlp_norm = (
            load.norm(f"{name}.{own}", size)
            for own in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
        assert isinstance(mixer, AttentionSpec)
        assert mlp is not None
        self.attention = Attention(load, spec, mixer, f"{name}.self_attn", in_features=2 * size)
        self.mlp = Mlp(load, spec, mlp, f"{name}.mlp")
        self.norm = load.norm(f"{root}norm", size)
        self.output = _read_output(load, config, size, target)
        load.checkpoint.check_all_read(ignoring=["t2d"])

    def combine(self, features: Tensor) -> Tensor:
        if self.features_norm is not None:
            features = rms_norm(features, self.features_norm, self.norm_eps)
        return self.fc.multiply(features)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
    ) -> Tensor:
        embedded = rms_norm(self.embedding.forward(token_ids), self.embedding_norm, self.norm_eps)
        normed = rms_norm(hidden, self.hidden_norm, self.norm_eps)
        residual = normed.clone() if self.is_normed_residual else hidden.clone()
        rotations: Rotations = {self.rope_key: self.rotary.at(positions)}
        x = self.attention.forward(torch.cat((embedded, normed), dim=-1), rotations, kv_caches[0], inputs)
        assert not isinstance(x, PartialSum)
        y = self.mlp.forward(add_rms_norm(x, residual, self.mlp_norm, self.norm_eps))
        assert not isinstance(y, PartialSum)
        return residual.add_(y)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.output.forward(rms_norm(hidden, self.norm, self.norm_eps))

    def to_draft_network(self) -> DraftNetwork | None:
        norms = self.hidden_norm, self.mlp_norm, None, None
        layer = make_dense_layer(self.attention, self.mlp, norms, self.norm_eps, [self.rope_key])
        output, combination = self.output.whole_weight, packed_weight(self.fc)
        if self.comm.size > 1 or layer is None or output is None or combination is None:
            return None
        if self.features_norm is not None:  # the native op combines hidden states as they are
            return None
        return DraftNetwork(
            layers=[layer],
            rotary_tables=[self.rotary.table],
            embedding=self.embedding.weight,
            embedding_scale=self.embedding.scale,
            output=output,
            output_ids=self.output.columns if isinstance(self.output, PartialVocabularyHead) else None,
            vocab_size=self.vocab_size,
            last_norm=self.norm,
            feeds_normed=False,
            eps=self.norm_eps,
            hidden_input=HiddenInput(
                combination=combination,
                projection=None,
                embedding_norm=self.embedding_norm,
                hidden_norm=self.hidden_norm,
                is_normed_residual=self.is_normed_residual,
            ),
        )


class PartialVocabularyHead:
    """Output layer for a part of the target's vocabulary; a rank computes the logits of its own tokens.

    Args:
        weight: of this rank's tokens, [n, E].
        columns: [n] int64, their places in this rank's part of the target's vocabulary.
        num_columns: of that part, with padding.
    """

    def __init__(self, weight: LinearWeight, columns: Tensor, num_columns: int) -> None:
        self._weight, self.columns, self._num_columns = weight, columns, num_columns

    @property
    def whole_weight(self) -> PackedWeight | None:
        """The weight of this rank's tokens; None if it is not packed."""
        return packed_weight(self._weight) if len(self.columns) else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, E] -> [N, num_columns] float32; -inf where the head has no token."""
        logits = x.new_full((len(x), self._num_columns), -torch.inf, dtype=torch.float32)
        if len(self.columns):
            logits.index_copy_(1, self.columns, self._weight.multiply(x).float())
        return logits


def _read_output(
    load: LoadContext, config: ModelConfig, hidden_size: int, target: Decoder
) -> VocabParallelHead | PartialVocabularyHead:
    """Return the head's own output layer, or that of the target model if the checkpoint has none."""
    if not load.checkpoint.has("lm_head.weight"):
        assert isinstance(target.head, VocabParallelHead), "a model that is pooled has no draft head"
        return target.head
    num_tokens, shard = config.hf.get("draft_vocab_size") or config.vocab_size, target.head.shard
    token_ids = torch.arange(num_tokens)
    if load.checkpoint.has("d2t"):
        token_ids += load.checkpoint.read("d2t", (num_tokens,))
    if num_tokens and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.vocab_size:
        raise ModelLoadError(
            f"{config.path}: d2t leads to token {int(token_ids.min())} or {int(token_ids.max())}, the vocabulary has "
            f"{config.vocab_size}"
        )
    is_local = (token_ids >= shard.start) & (token_ids < shard.end)
    whole = load.checkpoint.read("lm_head.weight", (num_tokens, hidden_size))
    weight = whole[is_local].to(load.device, load.dtype).contiguous()
    columns = (token_ids[is_local] - shard.start).to(load.device)
    return PartialVocabularyHead(PlainWeight(pack(weight)), columns, shard.padded_len)
