"""`quire models` and `quire download`."""

from typing import Annotated

import typer


def models() -> None:
    """List the model architectures that quire serves: with layers of its own, or with those of transformers.

    Those of transformers that are refused come last, with the reason. A model with transformers' layers is also
    checked when it is loaded, and refused if its layers mix tokens by more than attention. Any of them may be
    quantized, in the formats of docs/models.md.

    Example: `quire models`
    """
    from rich.console import Console
    from rich.table import Table
    from transformers.utils import logging

    from ...proto.model.registry import ARCHITECTURE_ALIASES, FAMILIES, TEXT_MODELS
    from ...proto.model.transformers_spec import list_architectures
    from ...proto.model.vision import VISION_READERS

    logging.set_verbosity_error()  # it warns of default configurations
    table = Table("architecture", "layers of", "tensor-parallel sizes", "reads")
    for architecture in FAMILIES:
        table.add_row(architecture, "quire", "that divide its heads", "text")
    for architecture, text_models in TEXT_MODELS.items():
        reads = "text and images" if architecture in VISION_READERS else "text"
        own = f"quire, as {' or '.join(text_models.values())}"
        table.add_row(architecture, own, "that divide its heads", reads)
    for architecture, own in ARCHITECTURE_ALIASES.items():
        reads = "text and images" if own in VISION_READERS else "text"
        table.add_row(architecture, f"quire, as {own}", "that divide its heads", reads)
    others = {name: own for name, own in list_architectures().items() if name not in FAMILIES}
    for architecture, listed in others.items():
        if not listed.refusal:
            sizes = "that divide its KV heads" if listed.has_plan else "1"
            table.add_row(architecture, "transformers", sizes, "text")
    for architecture, listed in others.items():
        if listed.refusal:
            table.add_row(architecture, f"refused: {listed.refusal}", "-", "-")
    Console().print(table)


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
