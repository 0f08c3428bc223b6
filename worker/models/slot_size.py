"""Size of a slot for a LoRA adapter, counted from the shapes of a model's weights alone."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...proto.model.target_modules import TargetModules
from ..lora.embedding_adapters import ROW_MULTIPLE

if TYPE_CHECKING:
    from torch import nn

# Names of layers whose inputs are sharded, and of those that each rank holds whole.
_ROW_PARALLEL = (
    *("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "w2", "dense_4h_to_h"),
    *("linear_out", "output_linear", "x_proj"),
)
_WHOLE = (
    *("gate", "router", "q_a_proj", "kv_a_proj_with_mqa", "wq_b", "wk"),
    *("f_a_proj", "g_a_proj", "linear", "index_qk_proj"),
)
_EMBEDDINGS = ("embed_tokens", "embed_tokens_per_layer", "wte")
_NOT_ADAPTED = (
    *("kv_b_proj", "norm", "wpe", "embed_positions"),
    *("conv1d", "conv_1d", ".conv.conv", "A_log", "rg_lru", "latent_proj"),
    *("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "mamba.D", "_hc.", "hc_head.", "kpool"),
    *("hyper_connection", ".ple."),
)
# Projections that are stored together and have an A each.
_NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2, "in_proj_qkv": 3}
# Layers that have their slots together.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
# Stacked matrix of experts |-> the names of their layers.
_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}


@dataclass(slots=True)
class SlotSize:
    """Elements of a slot, per dimension of the largest rank.

    Attributes:
        num_whole, num_sharded: on every rank, and split over the ranks.
        num_routed_whole, num_routed_sharded: the same, of the experts that a router chooses from.
        num_attention_sharded, num_shared_sharded, num_dense_sharded: of `num_sharded`, in the layers of attention, of
            the experts that every token passes, and of the networks of layers without experts.
    """

    max_rank: int
    num_whole: int = 0
    num_sharded: int = 0
    num_routed_whole: int = 0
    num_routed_sharded: int = 0
    num_attention_sharded: int = 0
    num_shared_sharded: int = 0
    num_dense_sharded: int = 0

    def rank_bytes(
        self,
        dtype_bytes: int,
        num_ranks: int,
        num_experts: int = 0,
        *,
        attention_ranks: int | None = None,
        sends_tokens: bool = False,
    ) -> int:
        """Return the bytes of the rank with the most.

        Args:
            num_experts: of a layer, if the ranks hold whole experts; otherwise 0.
            attention_ranks, sends_tokens: as for WeightSize.rank_bytes.
        """
        shared = self.num_shared_sharded if sends_tokens else 0
        of_group = 0
        if attention_ranks is not None:
            of_group = self.num_attention_sharded + (self.num_dense_sharded if sends_tokens else 0)
        elements = self.num_whole + shared + -(-(self.num_sharded - shared - of_group) // num_ranks)
        elements += -(-of_group // (attention_ranks or num_ranks))
        if num_experts:
            routed = self.num_routed_whole + self.num_routed_sharded
            elements += routed * -(-num_experts // num_ranks) // num_experts
        else:
            elements += self.num_routed_whole + -(-self.num_routed_sharded // num_ranks)
        return elements * self.max_rank * dtype_bytes


def measure_slot(module: nn.Module, hidden_size: int, max_rank: int, targets: TargetModules) -> SlotSize:
    """Count the elements of a slot.

    Args:
        module: as weight_size.make_meta_model returns it.
        targets: the modules that adapters may change.
    """
    size, counted = SlotSize(max_rank), set[int]()
    # A tied head has an adapter of its own; the uses of a shared block have the same ones.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for parameter_name, parameter in parameters.items():
        if id(parameter) in counted and not parameter_name.startswith("lm_head."):
            continue
        counted.add(id(parameter))
        name = parameter_name.removesuffix(".weight")
        is_adapted = parameter.dim() in (2, 3) and not any(part in name for part in _NOT_ADAPTED)
        if is_adapted and any(map(targets.has, _names_with(name))):
            if parameter.dim() == 3:
                _add_experts(size, name, tuple(parameter.shape), hidden_size)
            else:
                _add_layer(size, name, *parameter.shape, num_parts=_num_parts(name, parameters))
    return size


def _num_parts(name: str, parameters: Container[str]) -> int:
    """Return how many projections a layer stores together.

    Args:
        parameters: names of all of the model's.
    """
    above, _, last = name.rpartition(".")
    if last != "in_proj":
        return _NUM_PARTS.get(last, 1)
    if above.endswith(".conv"):
        return 3
    if f"{above}.x_proj_weight" in parameters:
        return 1  # of Mamba with heads, whose inputs and gates alternate
    return 2 if f"{above}.x_proj.weight" in parameters else 5  # of Mamba or Mamba 2


def _names_with(name: str) -> Iterator[str]:
    """Yield the names of the layers any of which, as a target, gives a layer its slots."""
    above, _, last = name.rpartition(".")
    yield name
    yield from (f"{above}.{each}" for group in _SIBLINGS if last in group for each in group)
    if above.endswith(".experts"):
        yield from (f"{above}.0.{each}" for each in _OF_EXPERTS.get(last, ()))


def _add_layer(size: SlotSize, name: str, num_outputs: int, num_inputs: int, *, num_parts: int) -> None:
    last, num_sharded = name.rpartition(".")[2], size.num_sharded
    if last in _EMBEDDINGS:
        size.num_whole += num_inputs + size.max_rank + -size.max_rank % ROW_MULTIPLE
        size.num_sharded += num_outputs
    elif last in _WHOLE:
        size.num_whole += num_parts * num_inputs + num_outputs
    elif last in _ROW_PARALLEL:
        size.num_whole += num_outputs
        size.num_sharded += num_inputs
    else:
        size.num_whole += num_parts * num_inputs
        size.num_sharded += num_outputs
    added = size.num_sharded - num_sharded
    if ".self_attn." in name:
        size.num_attention_sharded += added
    elif ".shared_expert" in name:
        size.num_shared_sharded += added
    elif ".mlp." in name:
        size.num_dense_sharded += added


def _add_experts(size: SlotSize, name: str, shape: tuple[int, ...], hidden_size: int) -> None:
    """Add a stack of matrices, whose inputs and outputs are in either order."""
    count, first, second = shape
    num_others = first * second // hidden_size
    num_parts = _NUM_PARTS.get(name.rpartition(".")[2], 1)
    size.num_routed_whole += count * num_parts * hidden_size
    size.num_routed_sharded += count * num_others
