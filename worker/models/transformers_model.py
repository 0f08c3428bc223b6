"""Any causal language model of transformers: its own modules, with our attention, our weights and our collectives.

The model is built on the meta device from its configuration. Its linear layers, its embedding and its head become
ours, sharded as its tensor-parallel plan says; its attention comes to us through transformers' attention interface.
A step's tokens go through it as one row of a batch: only attention looks at more than one token.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError, first_line
from ..attention import AttentionInputs, LayerCache
from ..comm.shard import Shard
from ..weights.checkpoint import Checkpoint
from .attention_adapters import ADAPTERS
from .layers import (
    ColumnParallelLinear,
    LoadContext,
    Projection,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from .paged_interface import IMPLEMENTATION, PagedStep
from .paged_selfcheck import run_paged_selfcheck
from .transformers_spec import ADAPTED, COLUMN, ROW, TransformersSpec, refusal

# Masks and tables that older checkpoints carry and that models compute.
_COMPUTED = r"\.(masked_bias|attn\.bias|attention\.bias|inv_freq)$"


class TransformersModel:
    """Token ids to hidden states to logits, by the modules of transformers; see `build.Model`.

    Raises:
        ConfigError: transformers cannot build the model from its configuration alone.
        ModelLoadError: the weights are not those of the model.
    """

    can_be_recorded = False  # nobody knows what modules that others wrote ask the device

    def __init__(self, load: LoadContext, spec: TransformersSpec, model: ModelConfig) -> None:
        self._load, self._spec, self._model = load, spec, model
        self._causal: Any = _build(model, load.dtype)
        self._prefix: str = self._causal.base_model_prefix
        self._body: Any = getattr(self._causal, self._prefix)
        _rename_stored(load.checkpoint, self._causal)
        self._compute_tables()
        self._step = PagedStep(model.num_layers)
        self._route_attention()
        tied = self._place_embedding()
        self.head = self._place_head(tied)
        self._place_linears()
        self._place_rest()
        load.checkpoint.check_all_read(self._names_without_use())
        # From here on the body runs by itself, and what is around it only makes logits.
        setattr(self._causal, self._prefix, _GivenStates())
        self._causal.eval()
        self._body.eval()

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[LayerCache], inputs: AttentionInputs
    ) -> Tensor:
        """Hidden states after the last norm."""
        with self._step.over(kv_caches, inputs):
            out = self._body(
                input_ids=token_ids.long().unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                return_dict=True,
            )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32."""
        logits: Tensor = self._causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return self.head.pad(logits.float())

    def check(self) -> None:
        """Raises ConfigError unless a few tokens prove that the model can be computed in chunks and batches."""
        shape = self._model.num_kv_heads // self._load.comm.size, self._model.head_dim
        try:
            run_paged_selfcheck(
                self.forward, self._model.num_layers, shape, self._load.dtype, self._load.device
            )
        except ConfigError as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, why: str) -> ConfigError:
        return refusal(self._model.name, self._spec.architecture, why)

    def _route_attention(self) -> None:
        for module in self._body.modules():
            adapter = ADAPTERS.get(type(module).__name__)
            if adapter is not None:
                module.forward = adapter(module, self._step.attend, self._load.device).forward
            elif getattr(module, "layer_idx", None) is not None:
                module.paged_step = self._step

    def _place_embedding(self) -> VocabParallelEmbedding | None:
        """Shards the embedding; returns it if the head shares it."""
        embedding = self._causal.get_input_embeddings()
        name = _name_of(self._causal, embedding)
        is_tied = bool(self._causal.config.tie_word_embeddings)
        is_plain = type(embedding) is nn.Embedding  # a kind of its own computes more than a look-up
        if not is_plain and not is_tied:
            return None
        ours = VocabParallelEmbedding(self._load, name, embedding.num_embeddings, embedding.embedding_dim)
        if is_plain:
            self._causal.set_submodule(name, _Layer(ours.forward))
        return ours if is_tied else None

    def _place_head(self, tied: VocabParallelEmbedding | None) -> VocabParallelHead:
        head = self._causal.get_output_embeddings()
        name = _name_of(self._causal, head)
        vocab_size, hidden_size = head.weight.shape
        has_bias = getattr(head, "bias", None) is not None
        ours = VocabParallelHead(self._load, name, hidden_size, vocab_size, tied, bias=has_bias)
        self._causal.set_submodule(name, _Layer(ours.own_logits))
        self._head_weight = f"{name}.weight"
        return ours

    def _place_linears(self) -> None:
        """Every linear layer of the body, on this rank as the plan says."""
        for name, module in list(self._body.named_modules()):
            if isinstance(module, nn.Linear | Conv1D):
                style = _style_of(name, self._spec)
                linear = self._make_linear(f"{self._prefix}.{name}", style, module)
                self._body.set_submodule(name, _Layer(linear.forward))

    def _make_linear(
        self, name: str, style: str | None, module: nn.Linear | Conv1D
    ) -> ColumnParallelLinear | RowParallelLinear:
        num_outputs, num_inputs = module.weight.shape
        if isinstance(module, Conv1D):  # stored with the inputs first
            num_inputs, num_outputs = num_outputs, num_inputs
            self._load.checkpoint.alias_transpose(f"{name}.weight", (num_inputs, num_outputs))
        has_bias = module.bias is not None
        if style == ROW:
            return RowParallelLinear(self._load, name, num_inputs, num_outputs, has_bias)
        shard = self._load.shard(num_outputs) if style == COLUMN else Shard(0, 1, num_outputs)
        return ColumnParallelLinear(self._load, [Projection(name, shard)], num_inputs, has_bias)

    def _place_rest(self) -> None:
        """Norms, positions and whatever else every rank holds in full."""
        for module_name, module in self._causal.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    tensor = self._read(f"{module_name}.{name}", parameter.shape, self._load.dtype)
                    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    tensor = self._read(f"{module_name}.{name}", buffer.shape, buffer.dtype)
                    module.register_buffer(name, tensor)

    def _read(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self._load.device)
        if len(shape) == 3 and not self._load.checkpoint.has(name):
            _read_experts(self._load, out, name)
        else:
            self._load.checkpoint.read_into(out, name, tuple(shape))
        return out

    def _compute_tables(self) -> None:
        """Has the model fill what no checkpoint has, such as rotary frequencies. Before any weight is in place: what
        fills them would make weights random.

        Raises:
            ConfigError: the model leaves one as it was.
        """
        for module_name, module in self._causal.named_modules():
            tables = {
                name: module.get_buffer(name)
                for name in sorted(module._non_persistent_buffers_set)
                if name in module._buffers and module.get_buffer(name).is_meta
            }
            zeros, ones = (self._fill(module, tables, number) for number in (0, 1))
            for name in tables:
                if not torch.equal(zeros[name], ones[name]):
                    raise self._refusal(f"transformers does not say how to compute {module_name}.{name}")

    def _fill(self, module: nn.Module, tables: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """A module's tables, which were full of a number before the model filled them."""
        for name, like in tables.items():
            filled = torch.full(like.shape, number, dtype=like.dtype, device=self._load.device)
            module.register_buffer(name, filled, persistent=False)
        if tables:
            self._causal._init_weights(module)
        return {name: module.get_buffer(name) for name in tables}

    def _names_without_use(self) -> Iterable[str]:
        patterns = [*(getattr(self._causal, "_keys_to_ignore_on_load_unexpected", None) or []), _COMPUTED]
        for name in self._load.checkpoint.names():
            if name == self._head_weight or any(re.search(pattern, name) for pattern in patterns):
                yield name


class _Layer(nn.Module):
    """One of our layers in a model of transformers, where tokens come as a batch.

    Args:
        ours: token ids [T] or their numbers [T, E] -> [T, N].
    """

    def __init__(self, ours: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._ours = ours

    def forward(self, x: Tensor) -> Tensor:
        """[...] token ids, or [..., E] -> [..., N]."""
        batch, own = (x.shape[:-1], x.shape[-1:]) if x.is_floating_point() else (x.shape, ())
        y = self._ours(x.reshape(-1, *own))
        return y.view(*batch, y.shape[-1])


class _GivenStates(nn.Module):
    """In place of a model's body: its hidden states are what it is handed as embeddings."""

    @property
    def decoder(self) -> _GivenStates:
        """OPT's causal model goes past its body, to this part of it."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _States:
        return _States(inputs_embeds)


class _States:
    """A body's result that has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _build(model: ModelConfig, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=False, local_files_only=True)
    # Adapted models are not asked for an implementation that only the interface has.
    implementation = "eager" if model.architecture in ADAPTED else IMPLEMENTATION
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=False
            )
    except Exception as error:  # whatever a model's constructor raises
        raise ConfigError(
            f"{model.name}: architecture {model.architecture!r} cannot be built from its config.json: "
            f"{first_line(error)}"
        ) from error
    # Masks are made for implementations that transformers knows masks for; this one has none.
    causal.config._attn_implementation = IMPLEMENTATION
    return causal


def _rename_stored(checkpoint: Checkpoint, causal: Any) -> None:
    """Has the checkpoint's tensors known by the names that the modules have today: some have changed since models
    were published, and those of base models alone lack the prefix."""
    renamings = [step for step in get_model_conversion_mapping(causal) if isinstance(step, WeightRenaming)]
    expected = set(causal.state_dict())
    for stored in checkpoint.names():
        name = stored
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        prefixed = f"{causal.base_model_prefix}.{name}"
        if name not in expected and prefixed in expected:
            name = prefixed
        if name != stored:
            checkpoint.rename(stored, name)


def _style_of(name: str, spec: TransformersSpec) -> str | None:
    return next((style for pattern, style in spec.plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _name_of(causal: nn.Module, wanted: nn.Module) -> str:
    name: str = next(name for name, module in causal.named_modules() if module is wanted)
    return name


def _read_experts(load: LoadContext, out: Tensor, name: str) -> None:
    """Fills a stack of the matrices of all experts, [experts, N, K], from a checkpoint that stores each by itself."""
    block, _, part = name.rpartition(".")
    sources = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
    for index, matrix in enumerate(out):
        for piece, source in zip(matrix.chunk(len(sources)), sources, strict=True):
            load.checkpoint.read_into(piece, f"{block}.{index}.{source}.weight", tuple(piece.shape))
