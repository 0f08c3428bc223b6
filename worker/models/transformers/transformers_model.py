"""TransformersModel: a causal language model of transformers with the attention, weights and collectives of quire.

The model is built on the meta device from its configuration. Layers of quire replace its linear layers, embedding and
head, sharded by its tensor-parallel plan. Its attention modules call quire through transformers' attention interface.
The model gets a step's tokens as a batch of one sequence: only attention mixes tokens.
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
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.pytorch_utils import Conv1D

from ....kernels.lora import LoraGroups
from ....proto.config import ModelConfig
from ....proto.errors import ConfigError, first_line
from ....proto.model.transformers_spec import ADAPTED, COLUMN, ROW, TransformersSpec, unsupported
from ...attention import AttentionInputs, LayerCache
from ...comm.shard import Shard
from ...weights.checkpoint import Checkpoint
from ...weights.weight_slice import WeightSlice
from ..aux_states import AuxStates
from ..fused_decode import log_op_by_op
from ..layers import ColumnParallelLinear, Projection, RowParallelLinear
from ..load_context import LoadContext
from ..output_tokens import OutputTokens
from ..vocab_parallel import VocabParallelEmbedding, VocabParallelHead
from .attention_adapters import ADAPTERS
from .paged_interface import IMPLEMENTATION, PagedStep
from .paged_selfcheck import run_paged_selfcheck

# Masks and tables that older checkpoints store and models compute.
_COMPUTED = r"\.(masked_bias|attn\.bias|attention\.bias|inv_freq)$"
# Name of an expert's matrix in a pattern of transformers' conversion, for example ``.experts.*.w1.weight``.
_EXPERT_PART = re.compile(r"experts\.\*\.(\w+)\.weight$")


class ParallelModule(nn.Module):
    """A layer of quire as a module, whose input has batch dimensions.

    Args:
        forward: of the layer; token ids [T] or hidden states [T, E] -> [T, N].
        weight: of the replaced module, on the meta device: some models ask for its dtype.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], weight: Tensor | None = None) -> None:
        super().__init__()
        self._forward = forward
        self.weight = None if weight is None else weight.detach()  # no parameter, which would be loaded

    def forward(self, x: Tensor) -> Tensor:
        """[...] token ids, or [..., E] -> [..., N]."""
        batch, features = (x.shape[:-1], x.shape[-1:]) if x.is_floating_point() else (x.shape, ())
        y = self._forward(x.reshape(-1, *features))
        return y.view(*batch, y.shape[-1])


class PrecomputedBody(nn.Module):
    """Replaces a model's body: returns the embeddings of its input as hidden states, so that only the head runs."""

    @property
    def decoder(self) -> PrecomputedBody:
        """The part of the body that OPT's causal model calls."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)


class _BodyOutput:
    """Output of a body with hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class TransformersModel:
    """A model made of transformers' modules; implements `loader.Model`.

    Raises:
        ConfigError: transformers cannot build the model from its configuration alone.
        ModelLoadError: the checkpoint does not match the model.
    """

    supports_graphs = False  # the modules may read results back from the device
    gathers_keys = False
    supports_outputs = False
    reserved_bytes = 0

    def __init__(self, load: LoadContext, spec: TransformersSpec, model: ModelConfig) -> None:
        self._load, self._spec, self._model = load, spec, model
        self._adapted: LoraGroups | None = None  # of the present call of `logits`
        self._causal: Any = _build(model, load.dtype)
        self._prefix: str = self._causal.base_model_prefix
        self._body: Any = getattr(self._causal, self._prefix)
        conversions = get_model_conversion_mapping(self._causal)
        _rename_stored(load.checkpoint, self._causal, conversions)
        self._expert_parts = _expert_parts(conversions)
        self._init_buffers()
        self._step = PagedStep(model.num_layers, model.layer_windows)
        self._route_attention()
        tied = self._replace_embedding()
        self.head = self._replace_head(tied)
        self._replace_linears()
        self._load_rest()
        load.checkpoint.check_all_read(self._ignored_names())
        # From here on `_body` is called directly, and `_causal` computes logits only.
        setattr(self._causal, self._prefix, PrecomputedBody())
        self._causal.eval()
        self._body.eval()
        log_op_by_op(load.device, "its layers are modules of transformers")

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[LayerCache],
        inputs: AttentionInputs,
        aux: AuxStates | None = None,
        outputs: OutputTokens | None = None,
    ) -> Tensor:
        """Return hidden states after the last norm, [T, E]."""
        assert aux is None, "modules of transformers do not show hidden states between layers"
        assert outputs is None, "modules of transformers compute all tokens"
        with self._step.bind(kv_caches, inputs):
            out = self._body(
                input_ids=token_ids.long().unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                return_dict=True,
            )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, adapted: LoraGroups | None = None) -> Tensor:
        """Return this rank's logits of [N, E] hidden states, [N, padded part of the vocabulary] float32."""
        self._adapted = adapted
        logits: Tensor = self._causal(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return self.head.pad(logits.float())

    def to_draft_network(self) -> None:
        """Return None: the modules of transformers compute the layers."""

    def selfcheck(self) -> None:
        """Run a few tokens in chunks and batches. Raises ConfigError if the hidden states depend on the split."""
        shape = self._model.num_kv_heads // self._load.comm.size, self._model.head_dim
        try:
            run_paged_selfcheck(
                self.forward, self._model.num_layers, shape, self._load.dtype, self._load.device
            )
        except ConfigError as error:
            raise self._unsupported(str(error)) from error

    def _unsupported(self, reason: str) -> ConfigError:
        return unsupported(self._model.name, self._spec.architecture, reason)

    def _route_attention(self) -> None:
        for module in self._body.modules():
            adapter = ADAPTERS.get(type(module).__name__)
            if adapter is not None:
                module.forward = adapter(module, self._step.attend, self._load.device).forward
            elif getattr(module, "layer_idx", None) is not None:
                module.paged_step = self._step

    def _replace_embedding(self) -> VocabParallelEmbedding | None:
        """Shard the embedding. Returns None unless the head shares its weight."""
        embedding = self._causal.get_input_embeddings()
        name = _name_of(self._causal, embedding)
        is_tied = bool(self._causal.config.tie_word_embeddings)
        is_plain = type(embedding) is nn.Embedding  # subclasses compute more than a look-up
        if not is_plain and not is_tied:
            return None
        sharded = VocabParallelEmbedding(
            self._load,
            name,
            embedding.num_embeddings,
            embedding.embedding_dim,
            tied=is_tied,
            adapted=is_plain,
        )
        if is_plain:
            self._causal.set_submodule(name, ParallelModule(sharded.forward))
        return sharded if is_tied else None

    def _replace_head(self, tied: VocabParallelEmbedding | None) -> VocabParallelHead:
        head = self._causal.get_output_embeddings()
        name = _name_of(self._causal, head)
        vocab_size, hidden_size = head.weight.shape
        has_bias = getattr(head, "bias", None) is not None
        sharded = VocabParallelHead(self._load, name, hidden_size, vocab_size, tied, bias=has_bias)
        self._causal.set_submodule(name, ParallelModule(lambda x: sharded.local_logits(x, self._adapted)))
        self._head_weight = f"{name}.weight"
        return sharded

    def _replace_linears(self) -> None:
        """Replace the linear layers of the body, sharded by the tensor-parallel plan.

        Those that compute more, as Phi-MoE's router, or in another dtype, as HunYuan's gate, stay as they are.
        """
        for name, module in list(self._body.named_modules()):
            style = _style_of(name, self._spec)
            if style is None and not (_is_plain(module) and module.weight.dtype == self._load.dtype):
                continue
            if isinstance(module, nn.Linear | Conv1D):
                linear = self._make_linear(f"{self._prefix}.{name}", style, module)
                self._body.set_submodule(name, ParallelModule(linear.forward, module.weight))

    def _make_linear(
        self, name: str, style: str | None, module: nn.Linear | Conv1D
    ) -> ColumnParallelLinear | RowParallelLinear:
        num_outputs, num_inputs = module.weight.shape
        if isinstance(module, Conv1D):  # stores [K, N]
            num_inputs, num_outputs = num_outputs, num_inputs
            self._load.checkpoint.alias_transpose(f"{name}.weight", (num_inputs, num_outputs))
        has_bias = module.bias is not None
        if style == ROW:
            return RowParallelLinear(self._load, name, num_inputs, num_outputs, has_bias)
        shard = self._load.shard(num_outputs) if style == COLUMN else Shard(0, 1, num_outputs)
        return ColumnParallelLinear(self._load, [Projection(name, shard)], num_inputs, has_bias)

    def _load_rest(self) -> None:
        """Read all remaining parameters and buffers, such as norms.

        Every rank holds them in full, except the norms that have weights per head: of those it holds its heads'.
        """
        for module_name, module in self._causal.named_modules():
            is_sharded = self._is_norm_of_sharded_heads(module_name)
            for name, parameter in list(module.named_parameters(recurse=False)):
                # Some modules draw a parameter where no device is given.
                if parameter.is_meta or self._load.checkpoint.has(f"{module_name}.{name}"):
                    tensor = self._read(f"{module_name}.{name}", parameter.shape, parameter.dtype, is_sharded)
                    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    tensor = self._read(f"{module_name}.{name}", buffer.shape, buffer.dtype)
                    module.register_buffer(name, tensor)

    def _is_norm_of_sharded_heads(self, name: str) -> bool:
        """Return whether a module normalizes the outputs of a projection of which this rank has some heads."""
        projection = re.sub(r"_norm$", "_proj", name.removeprefix(f"{self._prefix}."))
        return projection.endswith(("q_proj", "k_proj")) and _style_of(projection, self._spec) == COLUMN

    def _read(self, name: str, shape: torch.Size, dtype: torch.dtype, is_sharded: bool = False) -> Tensor:
        if is_sharded and len(shape) == 2:  # [heads, head_dim]
            return self._load.sharded(name, (shape[0], shape[1]), 0).to(dtype)
        out = torch.empty(shape, dtype=dtype, device=self._load.device)
        if len(shape) == 3 and not self._load.checkpoint.has(name):
            _read_experts(self._load, out, name, self._expert_parts)
        else:
            self._load.checkpoint.read_into(out, name, tuple(shape))
        return out

    def _init_buffers(self) -> None:
        """Compute buffers that no checkpoint has, such as rotary frequencies, with the model's own _init_weights.

        Must run before weights are loaded: _init_weights would overwrite them with random numbers.

        Raises:
            ConfigError: the model does not fill a buffer.
        """
        for module_name, module in self._causal.named_modules():
            buffers = {
                name: module.get_buffer(name)
                for name in sorted(module._non_persistent_buffers_set)
                if name in module._buffers and module.get_buffer(name).is_meta
            }
            zeros, ones = (self._fill(module, buffers, number) for number in (0, 1))
            for name in buffers:
                if not torch.equal(zeros[name], ones[name]):
                    raise self._unsupported(f"transformers does not compute the buffer {module_name}.{name}")

    def _fill(self, module: nn.Module, buffers: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """Fill a module's buffers with a number, let the model compute them, and return them."""
        for name, like in buffers.items():
            filled = torch.full(like.shape, number, dtype=like.dtype, device=self._load.device)
            module.register_buffer(name, filled, persistent=False)
        if buffers:
            self._causal._init_weights(module)
        return {name: module.get_buffer(name) for name in buffers}

    def _ignored_names(self) -> Iterable[str]:
        patterns = [*(getattr(self._causal, "_keys_to_ignore_on_load_unexpected", None) or []), _COMPUTED]
        for name in self._load.checkpoint.names():
            if name == self._head_weight or any(re.search(pattern, name) for pattern in patterns):
                yield name


def _build(model: ModelConfig, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=False, local_files_only=True)
    # Models with adapters do not use the attention interface.
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
    # transformers creates no masks for an implementation that it does not know.
    causal.config._attn_implementation = IMPLEMENTATION
    if not _has_aligned_experts(causal):
        causal.set_experts_implementation("eager")
    return causal


def _has_aligned_experts(causal: nn.Module) -> bool:
    """Return whether torch can multiply all experts at once, which takes rows of whole multiples of 16 bytes."""
    return all(
        length * weight.itemsize % 16 == 0
        for weight in causal.parameters()
        if weight.dim() == 3
        for length in weight.shape[1:]
    )


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, not a subclass that computes more."""
    return type(module) in (nn.Linear, Conv1D)


def _rename_stored(checkpoint: Checkpoint, causal: Any, conversions: Iterable[Any]) -> None:
    """Rename the checkpoint's tensors to the current names of the modules.

    Some modules were renamed after models had been published, and checkpoints of base models lack the prefix. The
    pattern of an old name may match the current one, too: Laguna's ``shared_expert.`` matches ``shared_experts``.
    """
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    modules = {name.rpartition(".")[0] for name in causal.state_dict()}

    def has_module(name: str) -> bool:
        """Return whether the model has a tensor's module: a quantized layer's tensors have names of their own."""
        return name.rpartition(".")[0] in modules

    for stored in checkpoint.names():
        name = stored
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        if not has_module(name) and has_module(stored):
            name = stored
        prefixed = f"{causal.base_model_prefix}.{name}"
        if not has_module(name) and has_module(prefixed):
            name = prefixed
        if name != stored:
            checkpoint.rename(stored, name)


def _style_of(name: str, spec: TransformersSpec) -> str | None:
    return next((style for pattern, style in spec.plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _name_of(causal: nn.Module, wanted: nn.Module) -> str:
    name: str = next(name for name, module in causal.named_modules() if module is wanted)
    return name


def _expert_parts(conversions: Iterable[Any]) -> dict[str, list[str]]:
    """Return name of a stack of matrices |-> names of the matrices that a checkpoint stores for each expert."""
    return {
        target.rpartition(".")[2]: [_EXPERT_PART.findall(source)[0] for source in step.source_patterns]
        for step in conversions
        if isinstance(step, WeightConverter) and all(map(_EXPERT_PART.search, step.source_patterns))
        for target in step.target_patterns
    }


def _read_experts(load: LoadContext, out: Tensor, name: str, parts: dict[str, list[str]]) -> None:
    """Read the stacked matrices of all experts, [experts, N, K], from a checkpoint that stores them one by one.

    Quantized ones are dequantized: transformers' modules multiply them.

    Args:
        parts: as `_expert_parts` returns them.
    """
    block, _, part = name.rpartition(".")
    sources = parts.get(part, [part])
    for index, matrix in enumerate(out):
        for piece, source in zip(matrix.chunk(len(sources)), sources, strict=True):
            expert = f"{block}.{index}.{source}"
            own = WeightSlice(expert, (piece.shape[0], piece.shape[1]), 0, 0, len(piece))
            piece.copy_(load.matrix(own))
