"""`quire models` and `quire download`."""

from typing import Annotated

import typer


def models() -> None:
    """List the model architectures that quire serves: with layers of its own, or with those of transformers.

    Each has a line. Those of transformers that are refused come last, by reason. A model with transformers' layers
    is also checked when it is loaded, and refused if its layers mix tokens by more than attention. Any of them may be
    quantized, in the formats of docs/models.md.

    Example: `quire models`
    """
    from transformers.utils import logging

    from ...proto.model.registry import ARCHITECTURE_ALIASES, FAMILIES, TEXT_MODELS
    from ...proto.model.transformers_spec import list_architectures
    from ...proto.model.vision import VISION_READERS

    logging.set_verbosity_error()  # it warns of default configurations
    own = {architecture: ("quire", architecture) for architecture in FAMILIES}
    own |= {name: (f"quire, as {' or '.join(texts.values())}", name) for name, texts in TEXT_MODELS.items()}
    own |= {name: (f"quire, as {alias}", alias) for name, alias in ARCHITECTURE_ALIASES.items()}
    rows = [("architecture", "reads", "tensor-parallel sizes", "layers of")]
    for name, (layers, reader) in own.items():
        reads = "text and images" if reader in VISION_READERS else "text"
        rows.append((name, reads, "that divide its heads", layers))
    refused: dict[str, list[str]] = {}
    for name, listed in list_architectures().items():
        if name in FAMILIES:
            continue
        if listed.refusal:
            refused.setdefault(listed.refusal, []).append(name)
        else:
            sizes = "that divide its KV heads" if listed.has_plan else "1"
            rows.append((name, "text", sizes, "transformers"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for reason, names in refused.items():
        print(f"\nrefused, since {reason}:")
        print(*(f"  {name}" for name in names), sep="\n")


def download(
    model: Annotated[
        str, typer.Argument(help="ORG/NAME of a model on the Hugging Face Hub.", metavar="ORG/MODEL")
    ],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit. Default: the main branch.")
    ] = None,
) -> None:
    """Download a model into the local cache, and print its directory.

    Takes configuration, tokenizer and safetensors weights; never code or pickles. HF_TOKEN gives access to gated
    models, HF_HOME is the cache, and HF_ENDPOINT another server that speaks the hub's API.

    Example: `quire download Qwen/Qwen3-8B`
    """
    from ...proto.errors import ModelLoadError
    from ..config.hub import download_model, is_model_id
    from ..os_utils.logs import log_to_stderr

    if not is_model_id(model):
        raise ModelLoadError(f"{model!r} is not ORG/NAME, the id of a model on the Hugging Face Hub")
    log_to_stderr()
    print(download_model(model, revision).path)
