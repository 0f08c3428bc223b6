"""The engine options as LLM's keyword arguments."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...proto.options.option import (
    check_names,
    declared_options,
    keyword_parameters,
    read_environment,
    select_options,
)
from ..config.engine_options import EngineOptions
from ..config.vllm_arguments import ENGINE_ARGUMENTS, translate_arguments

# Offline the caller holds all prompts anyway, so that refusing some gains nothing, and is the operator as well.
OFFLINE_DEFAULTS: Mapping[str, Any] = {"max_queue_len": 1 << 30, "trust_request_chat_template": True}

F = TypeVar("F", bound=Callable[..., Any])


class EngineArgs(EngineOptions):
    """The engine options of LLM under vLLM's name: ``LLM(**asdict(EngineArgs(model, ...)))``.

    Raises:
        ConfigError: as LLM does.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(**vars(read_engine_options(model, options, os.environ)))


class AsyncEngineArgs(EngineArgs):
    """The options of AsyncLLMEngine under vLLM's name."""


def takes_engine_options(function: F) -> F:
    """Show the engine options in the signature of a function that takes ``**options``, for help() and editors."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [*named, *keyword_parameters(EngineOptions, OFFLINE_DEFAULTS)]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def read_engine_options(
    model: str, given: Mapping[str, Any], environment: Mapping[str, str]
) -> EngineOptions:
    """Return the options of an offline engine: arguments win over the environment, that over the defaults.

    Raises:
        ConfigError: there is no such option, or a value that the option cannot have.
    """
    check_names(given, "LLM", [*declared_options(EngineOptions), *ENGINE_ARGUMENTS])
    given = translate_arguments(given, model)
    values = {
        **OFFLINE_DEFAULTS,
        **read_environment(environment, EngineOptions),
        **select_options(EngineOptions, given),
    }
    return EngineOptions(model, **values)
