"""The tables of docs/models.md, made from the tests: ``python tests/support/models_page.py`` writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from model_kinds import KINDS, SINCE_5_24, TEXT_ONLY, model_type_of, ranks_for
from published_checkpoints import CHECKPOINTS, Published
from quantized_models import SCHEMES
from state_kinds import STATE_KINDS

from quire.proto.model.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
START, END = "<!-- from the tests: tests/support/models_page.py -->", "<!-- end -->"
# Layout of a scheme |-> name in config.json.
LAYOUTS = {
    "gptq": "`gptq`",
    "awq": "`awq` (GEMM)",
    "packed": "`compressed-tensors`, `pack-quantized`",
    "codes": "`compressed-tensors`, `int-quantized` and `float-quantized`",
    "nvfp4": "`compressed-tensors`, `nvfp4-pack-quantized`",
    "mxfp4": "`compressed-tensors`, `mxfp4-pack-quantized`; `mxfp4` of gpt-oss",
    "float8": "`fp8`, also with scales per block",
    "modelopt": "`modelopt`: FP8 (also per channel and per block), NVFP4, and both mixed",
}


def architectures() -> dict[str, list[str]]:
    """Return architecture |-> kinds that are compared with transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, list[str]] = {}
    for kind in (*KINDS, *STATE_KINDS):
        family = model_type_of(kind)
        names = SINCE_5_24.get(kind) or TEXT_ONLY.get(family) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        found.setdefault(names if isinstance(names, str) else names[0], []).append(kind)
    return found


def architecture_of(published: Published) -> str:
    """Return the architecture that a published checkpoint has in its config.json."""
    kind = published.kind
    return published.architecture[0] or next(name for name, kinds in architectures().items() if kind in kinds)


def tables() -> str:
    """Return the tables, in Markdown."""
    names: dict[tuple[str, str], list[str]] = {}
    for architecture, kinds in sorted(architectures().items()):
        ranks = sorted({tp for kind in kinds for tp in ranks_for(kind)})
        by = "quire" if architecture in FAMILIES else "transformers"
        names.setdefault((by, ", ".join(map(str, ranks))), []).append(f"`{architecture}`")
    rows = [(*key, ", ".join(own)) for key, own in sorted(names.items())]
    formats = []
    for layout, name in LAYOUTS.items():
        schemes = [key for key, scheme in SCHEMES.items() if scheme.layout == layout]
        formats.append((name, ", ".join(schemes)))
    layouts: dict[str, list[str]] = {}
    for published in CHECKPOINTS.values():
        own = LAYOUTS[published.scheme.layout]
        if published.scheme.experts is not None:
            own += ", and experts in `mxfp4`"
        layouts.setdefault(architecture_of(published), []).append(own)
    checkpoints = [(f"`{name}`", "; ".join(dict.fromkeys(own))) for name, own in sorted(layouts.items())]
    return "\n\n".join(
        (
            START,
            _table(("layers of", "tensor-parallel sizes compared", "architectures"), rows),
            _table(("format", "compared with dequantized weights"), formats),
            _table(("published checkpoint of", "formats"), checkpoints),
            END,
        )
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    PAGE.write_text(before + tables() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
