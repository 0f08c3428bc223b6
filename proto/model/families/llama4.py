"""Llama 4: layers without positions or in chunks, and experts whose inputs are scaled."""

from __future__ import annotations

from typing import Any

from ..attention import QkNorm
from ..experts import ExpertFields
from ..family import Family, FieldNames
from ..spec import Names


def _adapt(hf: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of Llama 4, which names the size of its dense layers after that of its experts."""
    return hf | {
        "moe_intermediate_size": hf["intermediate_size"],
        "intermediate_size": hf["intermediate_size_mlp"],
        "no_rope_layers": hf["no_rope_layers"][: hf["num_hidden_layers"]],
    }


FAMILY = Family(
    fields=FieldNames(qk_norm="use_qk_norm"),
    qk_norm=QkNorm("rotated_unweighted"),
    interleaved_rope=True,
    experts=ExpertFields(
        "num_local_experts",
        "moe_intermediate_size",
        shared_size="moe_intermediate_size",
        normalized=False,
        routing="llama4",
    ),
    names=Names(mlp="feed_forward"),
    adapt=_adapt,
)
