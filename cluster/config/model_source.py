"""Location of a model's files: the bundled model, a directory, or a snapshot of a model on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...proto.config import ModelConfig
from ...proto.errors import ConfigError, ModelLoadError
from .deployment import Deployment
from .engine_options import EngineOptions, ModelReference
from .hub import download_model, find_commit
from .model_checks import check_model_files, check_weight_files
from .model_config import describe_model


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files of a model on this machine.

    Attributes:
        path: the directory of the files.
        hub_id: ORG/NAME on the hub; empty for a directory.
        commit: commit of the snapshot; empty for a directory.
    """

    path: Path
    hub_id: str = ""
    commit: str = ""


def locate_model(reference: ModelReference, *, with_weights: bool) -> ModelSource:
    """Return the files of a model, after downloading those that are missing.

    Args:
        with_weights: the weights are needed on this machine.

    Raises:
        ModelLoadError: there is no such directory or model, or the download failed.
        ConfigError: a revision is given for a directory.
    """
    if reference.hub_id:
        try:
            snapshot = download_model(reference.hub_id, reference.revision, with_weights=with_weights)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error} (and there is no directory {reference.model})") from error
        source = ModelSource(snapshot.path, reference.hub_id, snapshot.commit)
    else:
        if reference.revision is not None:
            raise ConfigError(f"revision is {reference.revision!r}, but {reference.model} is a directory")
        source = ModelSource(reference.model_path)
    check_model_files(source.path, with_weights)
    if with_weights:
        check_weight_files(source.path)
    return source


def describe_files(options: EngineOptions) -> ModelConfig:
    """Return the model of the options from its configuration files; its weights need not be on this machine.

    Raises:
        ModelLoadError, ConfigError: as `locate_model` and `describe_model` do.
    """
    source = locate_model(options, with_weights=False)
    described = describe_model(source.path, options.name, runner=options.runner)
    return replace(
        described,
        vision=None if options.language_model_only else described.vision,
        hub_id=source.hub_id,
        commit=source.commit,
        quantization=options.quantization,
        mamba_ssm_cache_dtype=options.mamba_ssm_cache_dtype,
    )


def pin_revision(deployment: Deployment) -> Deployment:
    """Return the deployment with the commit that its revision names now, so that all replicas load the same files.

    Raises:
        ModelLoadError: there is no such model or revision, or the hub does not answer.
    """
    engine = deployment.engine
    if not engine.hub_id:
        return deployment
    commit = find_commit(engine.hub_id, engine.revision)
    return replace(deployment, engine=replace(engine, revision=commit))
