"""`quire download`."""

from typing import Annotated

import typer


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
