"""Random draft heads in the published layouts, and what they draft, computed in plain PyTorch."""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from state_kinds import STATE_KINDS
from torch import Tensor

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.config import SpeculativeConfig

# Targets whose last layer is also the head's |-> their model type and settings.
APPENDED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-dense": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "deepseek_v32": ("deepseek_v32", {"index_topk": 7}),
    "qwen3_next": ("qwen3_next", STATE_KINDS["qwen3_next"] | {"mlp_only_layers": []}),
}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 8, 4, 16, 128
EPS, THETA = 1e-6, 10000.0


def make_target_with_head(
    make_model: Callable[..., Path], folder: Path, kind: str, num_drafts: int
) -> tuple[Path, SpeculativeConfig]:
    """Return a target model and its head, which are made once in a folder.

    Args:
        kind: ``eagle3``, ``mtp`` or one of APPENDED.
    """
    path, method, head = folder / kind, "mtp", None
    model_type, settings = APPENDED.get(kind, ("llama", {}))
    target = make_model(model_type, **settings)
    if kind == "eagle3":
        shape, method, head = json.loads((target / "config.json").read_text()), kind, str(path)
        if not path.exists():
            write_eagle3(path, shape["vocab_size"], num_layers=shape["num_hidden_layers"])
    elif not path.exists():
        target = add_mtp(target, path, mimo=False) if kind == "mtp" else append_mtp(target, path)
    else:
        target = path
    text = json.dumps({"method": method, "model": head, "num_speculative_tokens": num_drafts})
    options = EngineOptions(
        str(target), device="cpu", speculative_config=text, dtype="float32", max_model_len=128
    )
    speculative = resolve(options, Machine(1, 0)).speculative
    assert speculative is not None
    return target, speculative


def write_eagle3(folder: Path, vocab_size: int, *, num_layers: int, seed: int = 0, **settings: Any) -> Path:
    """Write a head for a model of HIDDEN numbers per token.

    Args:
        num_layers: of the target model.
        settings: of config.json; `draft_vocab_size` brings an output layer and d2t, otherwise the target's is shared.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"midlayer.{name}": tensor for name, tensor in _layer(generator, 2 * HIDDEN).items()}
    tensors["midlayer.hidden_norm.weight"] = _norm(generator)
    tensors["fc.weight"] = _matrix(generator, HIDDEN, 3 * HIDDEN)
    tensors["norm.weight"] = _norm(generator)
    draft_vocab_size = settings.get("draft_vocab_size")
    if draft_vocab_size is not None:
        tensors["lm_head.weight"] = _matrix(generator, draft_vocab_size, HIDDEN)
        kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, num_layers]},
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def add_mtp(source: Path, folder: Path, *, mimo: bool, seed: int = 0) -> Path:
    """Copy a model and add a head of multi-token prediction in the layout of MiMo or of DeepSeek-V3."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    index, generator = config["num_hidden_layers"], torch.Generator().manual_seed(seed)
    if mimo:
        prefix = "model.mtp_layers.0."
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        config["architectures"] = ["MiMoForCausalLM"]
    else:
        prefix = f"model.layers.{index}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    embedding_norm, hidden_norm, projection, final_norm = (f"{prefix}{name}.weight" for name in names)
    tensors = load_file(folder / "model.safetensors")
    has_bias = "model.layers.0.self_attn.q_proj.bias" in tensors
    tensors |= {f"{prefix}{name}": own for name, own in _layer(generator, HIDDEN, has_bias=has_bias).items()}
    tensors |= {name: _norm(generator) for name in (embedding_norm, hidden_norm, final_norm)}
    tensors[projection] = _matrix(generator, HIDDEN, 2 * HIDDEN)
    if not mimo:  # copies that checkpoints of this layout bring
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_speculators(head: Path, folder: Path) -> Path:
    """Write a head of `write_eagle3` as the library speculators does, with a norm of the hidden states."""
    generator = torch.Generator().manual_seed(9)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(head / "model.safetensors").items()
    }
    tensors["input_norm.weight"] = 1 + torch.randn(3 * HIDDEN, generator=generator) / 4
    layer = json.loads((head / "config.json").read_text())
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": layer.pop("draft_vocab_size", layer["vocab_size"]),
        "dtype": "float32",
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": layer.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"],
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def append_mtp(source: Path, folder: Path, seed: int = 0) -> Path:
    """Copy a model and add a head whose layer is one of its own with noise.

    The head of ERNIE 4.5 is its first layer, which is dense, and has names of its own. Others are like the last layer
    with attention: in Qwen3-Next and 3.5 with names of their own, and the layer after the last one otherwise.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    prefix, copied = mtp_prefix(config), "model.layers.0."
    if not prefix.startswith("model.mtp_block"):
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        last = max(index for index, kind in enumerate(kinds) if kind != "linear_attention")
        copied = f"model.layers.{last}."
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(copied)]:
        own = tensors[name].clone()
        if own.dim() > 1:
            own += torch.randn(own.shape, generator=generator) * own.std() / 2
        tensors[prefix + name.removeprefix(copied)] = own
    for name in [name for name in tensors if name.startswith("model.layers.0.self_attn.indexer.")]:
        # The copied layer may use the choice of another one.
        tensors.setdefault(prefix + name.removeprefix("model.layers.0."), tensors[name].clone())
    *norms, projection = mtp_names(config)
    offset = 1 if prefix == "mtp.layers.0." else 0  # that of the norms of Qwen3-Next is not stored
    tensors |= {f"{name}.weight": _norm(generator) - offset for name in norms if name != "model.norm"}
    tensors[f"{projection}.weight"] = _matrix(generator, HIDDEN, 2 * HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def mtp_prefix(config: dict[str, Any]) -> str:
    """Return the prefix of the layer of a model's head."""
    architecture = config["architectures"][0]
    if architecture.startswith("Ernie"):
        return "model.mtp_block.0."
    return (
        "mtp.layers.0."
        if architecture.startswith("Qwen3")
        else f"model.layers.{config['num_hidden_layers']}."
    )


def mtp_names(config: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the names of a head's norms of embeddings, of hidden states and of its result, and of its projection."""
    prefix = mtp_prefix(config)
    if prefix == "model.mtp_block.0.":
        return "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.norm", "model.mtp_linear_proj.0"
    if prefix == "mtp.layers.0.":
        return "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc"
    is_bailing = config["architectures"][0].startswith("Bailing")
    last = "final_layernorm" if is_bailing else "shared_head.norm"
    return f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}{last}", f"{prefix}eh_proj"


def _layer(generator: torch.Generator, in_features: int, *, has_bias: bool = False) -> dict[str, Tensor]:
    q_len, kv_len = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "self_attn.q_proj.weight": _matrix(generator, q_len, in_features),
        "self_attn.k_proj.weight": _matrix(generator, kv_len, in_features),
        "self_attn.v_proj.weight": _matrix(generator, kv_len, in_features),
        "self_attn.o_proj.weight": _matrix(generator, HIDDEN, q_len),
        "mlp.gate_proj.weight": _matrix(generator, INNER, HIDDEN),
        "mlp.up_proj.weight": _matrix(generator, INNER, HIDDEN),
        "mlp.down_proj.weight": _matrix(generator, HIDDEN, INNER),
        "input_layernorm.weight": _norm(generator),
        "post_attention_layernorm.weight": _norm(generator),
    }
    if has_bias:
        lengths = {"q": q_len, "k": kv_len, "v": kv_len}
        for name, length in lengths.items():
            tensors[f"self_attn.{name}_proj.bias"] = torch.randn(length, generator=generator) / 2
    return tensors


def _matrix(generator: torch.Generator, out_features: int, in_features: int) -> Tensor:
    matrix = torch.randn(out_features, in_features, generator=generator)
    return matrix.mul_(1.5 / math.sqrt(in_features))


def _norm(generator: torch.Generator) -> Tensor:
    return 1 + torch.randn(HIDDEN, generator=generator) / 4


class HeadReference(ABC):
    """A head beside its target model in transformers.

    Args:
        model: of transformers, in float32.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.model = model

    @torch.inference_mode()
    def draft(self, tokens: list[int], count: int) -> list[tuple[Tensor, int]]:
        """Return the logits and the most likely token of each of `count` drafted tokens after `tokens`."""
        hidden = list(self.hidden_of(tokens[:-1]))
        known, drafts = list(tokens), list[tuple[Tensor, int]]()
        while len(drafts) < count:
            own = self.layer(self.model.model.embed_tokens(torch.tensor(known[1:])), torch.stack(hidden))
            logits = self.logits(own[-1])
            drafts.append((logits, int(logits.argmax())))
            known.append(drafts[-1][1])
            hidden.append(self.recurrent(own[-1]))
        return drafts

    @torch.inference_mode()
    def states_of(self, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
        """Return the input of each layer and the output of the last one, and the hidden states after the norm."""
        kept: list[Tensor] = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
        out = self.model.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        handle.remove()
        return [*(state[0] for state in out.hidden_states[:-1]), kept[0][0]], out.last_hidden_state[0]

    @abstractmethod
    def hidden_of(self, tokens: list[int]) -> Tensor:
        """Return what the head reads of each token, [T, E]."""

    @abstractmethod
    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the output of the head's layer for all pairs, [T, E]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, [V]."""

    def recurrent(self, hidden: Tensor) -> Tensor:
        """Return what stands for the hidden state of the target model in the next pair."""
        return hidden

    def _target_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return torch.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], EPS)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _attend(self, prefix: str, x: Tensor) -> Tensor:
        q, k, v = (
            self._linear(f"{prefix}self_attn.{name}_proj", x).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
            for name in "qkv"
        )
        half = HEAD_DIM // 2
        angles = torch.arange(len(x))[:, None] * THETA ** -(torch.arange(half) / half)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def rotate(y: Tensor) -> Tensor:
            return y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin

        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (rotate(k), v))
        out = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        return self._linear(f"{prefix}self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        gated = F.silu(self._linear(f"{prefix}mlp.gate_proj", x)) * self._linear(f"{prefix}mlp.up_proj", x)
        return self._linear(f"{prefix}mlp.down_proj", gated)


class Eagle3(HeadReference):
    """An EAGLE-3 head, also one that the library speculators has written."""

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        if "transformer_layer_config" in self.config:
            layers = {"eagle_aux_hidden_state_layer_ids": self.config["eagle_aux_hidden_state_layer_ids"]}
            own = {"eagle_config": layers, "norm_before_residual": True}
            self.config = self.config["transformer_layer_config"] | own
            self.tensors = {
                name.replace("layers.0.", "midlayer."): tensor for name, tensor in self.tensors.items()
            }

    def hidden_of(self, tokens: list[int]) -> Tensor:
        states, _ = self.states_of(tokens)
        layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        features = torch.cat([states[layer] for layer in layers], -1)
        if "input_norm.weight" in self.tensors:
            features = self._norm("input_norm", features)
        return self._linear("fc", features)

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm("midlayer.hidden_norm", hidden)
        if self.config.get("norm_before_residual"):
            hidden = normed
        x = torch.cat((self._norm("midlayer.input_layernorm", embedded), normed), -1)
        hidden = hidden + self._attend("midlayer.", x)
        return hidden + self._mlp("midlayer.", self._norm("midlayer.post_attention_layernorm", hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        normed = self._norm("norm", hidden)
        if "lm_head.weight" not in self.tensors:
            return self._target_logits(normed)
        logits = torch.full((self.config["vocab_size"],), -torch.inf)
        ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
        logits[ids] = self._linear("lm_head", normed)
        return logits


class Mtp(HeadReference):
    """A head of multi-token prediction, of either layout."""

    @property
    def is_mimo(self) -> bool:
        return bool(self.config["architectures"] == ["MiMoForCausalLM"])

    @property
    def prefix(self) -> str:
        return "model.mtp_layers.0." if self.is_mimo else f"model.layers.{self.config['num_hidden_layers']}."

    def hidden_of(self, tokens: list[int]) -> Tensor:
        return self.states_of(tokens)[1]

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        embedded = embedded.clone()
        embedded[0] = 0
        names = ("token_layernorm", "hidden_layernorm") if self.is_mimo else ("enorm", "hnorm")
        parts = [self._norm(self.prefix + name, x) for name, x in zip(names, (embedded, hidden), strict=True)]
        if self.is_mimo:
            x = self._linear(f"{self.prefix}input_proj", torch.cat(parts[::-1], -1))
        else:
            x = self._linear(f"{self.prefix}eh_proj", torch.cat(parts, -1))
        x = x + self._attend(self.prefix, self._norm(f"{self.prefix}input_layernorm", x))
        return x + self._mlp(self.prefix, self._norm(f"{self.prefix}post_attention_layernorm", x))

    def logits(self, hidden: Tensor) -> Tensor:
        name = "final_layernorm" if self.is_mimo else "shared_head.norm"
        return self._target_logits(self._norm(self.prefix + name, hidden))

    def recurrent(self, hidden: Tensor) -> Tensor:
        return self._norm(f"{self.prefix}final_layernorm", hidden) if self.is_mimo else hidden


class LayerMtp(HeadReference):
    """A head of `append_mtp`, whose layer transformers computes as a model of one layer."""

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder, model)
        self.prefix, self.names = mtp_prefix(self.config), mtp_names(self.config)
        is_qwen = self.prefix == "mtp.layers.0."
        self.norm_offset = 1 if is_qwen else 0
        self.reads_first = is_qwen or self.prefix == "model.mtp_block.0."
        self.feeds_normed = self.reads_first or self.names[2].endswith("final_layernorm")
        self.single = self._one_layer(folder.with_name(f"{folder.name}-layer"))

    def _one_layer(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        shared = (
            "model.embed_tokens.weight",
            "model.word_embeddings.weight",
            "model.norm.weight",
            "lm_head.weight",
        )
        tensors = {name: self.tensors[name] for name in shared if name in self.tensors}
        tensors |= {
            name.replace(self.prefix, "model.layers.0."): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(self.prefix)
        }
        config = self.config | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
        for name in ("layer_types", "mlp_layer_types"):
            if config.get(name):
                config[name] = [kind for kind in config[name] if kind != "linear_attention"][-1:]
        if config.get("indexer_types"):
            config["indexer_types"] = ["full"]
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = 0
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden_of(self, tokens: list[int]) -> Tensor:
        return self.states_of(tokens)[1]

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        embedded = embedded.clone()
        if not self.reads_first:
            embedded[0] = 0
        embedding_norm, hidden_norm, _, projection = self.names
        parts = self._norm(embedding_norm, embedded), self._norm(hidden_norm, hidden)
        kept: list[Tensor] = []
        model = self.single.model
        handle = model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
        model(inputs_embeds=self._linear(projection, torch.cat(parts, -1))[None], use_cache=False)
        handle.remove()
        return kept[0][0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target_logits(self._norm(self.names[2], hidden))

    def recurrent(self, hidden: Tensor) -> Tensor:
        return self._norm(self.names[2], hidden) if self.feeds_normed else hidden

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{name}.weight"] + self.norm_offset
        return torch.rms_norm(x, x.shape[-1:], weight, self.config["rms_norm_eps"])
