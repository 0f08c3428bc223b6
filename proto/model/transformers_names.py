"""Names that the installed transformers registers, read from its source: importing it takes two seconds."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

_CONFIGURATIONS = ("configuration_auto.py", "auto_mappings.py")
_MODELS = ("modeling_auto.py",)

# Published model type |-> that of a configuration in transformers with the same fields.
MODEL_TYPE_ALIASES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}


def has_model_type(model_type: str) -> bool:
    """Return False if transformers surely has no configuration of that model type."""
    return _names(_CONFIGURATIONS, MODEL_TYPE_ALIASES.get(model_type, model_type))


def has_architecture(architecture: str) -> bool:
    """Return False if transformers surely has no model of that name."""
    return _names(_MODELS, architecture)


def _names(files: tuple[str, ...], name: str) -> bool:
    source = _source(files)
    return not source or f'"{name}"' in source


@functools.cache
def _source(files: tuple[str, ...]) -> str:
    """Return the source of modules of transformers.models.auto; empty if transformers is not installed as files."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    folder = Path(package.origin).parent / "models" / "auto"
    return "".join((folder / name).read_text() for name in files if (folder / name).is_file())
