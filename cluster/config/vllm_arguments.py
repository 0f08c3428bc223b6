"""Arguments of vLLM's LLM and `vllm serve` that quire has under another name, ignores or refuses.

Arguments that mean the same under the same name, such as `max_model_len`, are options of quire. docs/vllm.md lists
all.
"""

import json
import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

from ...proto.errors import ConfigError
from ...proto.options.option import option

_log = logging.getLogger(__name__)

GROUP = "Names of vLLM"


@dataclass(frozen=True, slots=True)
class Renamed:
    """An option of quire under another name.

    Attributes:
        option: quire's name.
        convert: vLLM's value |-> quire's.
    """

    option: str
    convert: Callable[[Any], Any] = lambda value: value

    @property
    def words(self) -> str:
        return f"The option --{self.option.replace('_', '-')}."


@dataclass(frozen=True, slots=True)
class Ignored:
    """Accepted with a warning, since it has no meaning here."""

    reason: str

    @property
    def words(self) -> str:
        return f"Ignored: {self.reason}."


@dataclass(frozen=True, slots=True)
class Refused:
    """Refused, except for values that ask for what quire does anyway."""

    reason: str
    allowed: tuple[Any, ...] = ()

    @property
    def words(self) -> str:
        but = f" but {' and '.join(map(str, self.allowed))}" if self.allowed else ""
        return f"Refused{but}: {self.reason}."


@dataclass(frozen=True, slots=True)
class Members:
    """A JSON object whose members are options of quire.

    Attributes:
        options: vLLM's name of a member |-> quire's option.
        ignored: members without a meaning here.
    """

    options: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in self.options.values())
        return f"JSON, whose members are the options {names}."


Treatment = Renamed | Ignored | Refused | Members


# vLLM's names of backends that quire has not stand for the choice of the first that fits.
_STRUCTURED_OUTPUTS = Members(
    {
        "backend": "structured_outputs_backend",
        "disable_any_whitespace": "disable_any_whitespace",
        "disable_additional_properties": "disable_additional_properties",
        "reasoning_parser": "reasoning_parser",
    },
    ("reasoning_parser_plugin", "enable_in_reasoning", "disable_fallback"),
)
_ONE_LOG = "logs and metrics do not depend on it"

# argument |-> the type of its value, and what becomes of it
ENGINE_ARGUMENTS: Mapping[str, tuple[type, Treatment]] = {
    "async_scheduling": (bool, Renamed("max_steps_in_flight", lambda value: 2 if value else 1)),
    "enable_prefix_caching": (bool, Renamed("prefix_caching")),
    "enforce_eager": (bool, Renamed("cuda_graphs", operator.not_)),
    "kv_cache_memory_bytes": (str, Renamed("kv_cache_memory")),
    "num_gpu_blocks_override": (int, Renamed("num_kv_blocks")),
    "scheduling_policy": (str, Renamed("policy")),
    "structured_outputs_config": (str, _STRUCTURED_OUTPUTS),
    "code_revision": (str, Ignored("code of a model is never loaded")),
    "compilation_config": (str, Ignored("models are not compiled with torch.compile")),
    "disable_cascade_attn": (bool, Ignored("attention has no cascade")),
    "disable_custom_all_reduce": (bool, Ignored("quire's own is off unless --fused-all-reduce turns it on")),
    "disable_log_stats": (bool, Ignored(_ONE_LOG)),
    "distributed_executor_backend": (str, Ignored("one rank needs no executor, and Ray places several")),
    "download_dir": (str, Ignored("the variable HF_HOME sets where downloads are kept")),
    "enable_sleep_mode": (bool, Ignored("every engine can sleep")),
    "guided_decoding_backend": (str, Renamed("structured_outputs_backend")),
    "max_parallel_loading_workers": (int, Ignored("each rank reads its own part of the weights")),
    "fully_sharded_loras": (bool, Ignored("adapters are sharded so that they need no collectives of their own")),
    "lora_dtype": (str, Ignored("adapters have the type of activations")),
    "lora_extra_vocab_size": (int, Ignored("adapters add no tokens to the vocabulary")),
    "max_seq_len_to_capture": (int, Ignored("CUDA graphs cover decode steps of any length")),
    "model_impl": (str, Ignored("the registry chooses between quire's decoder and transformers' modules")),
    "swap_space": (float, Ignored("--num-host-kv-blocks sets the blocks in host memory")),
    "tokenizer_mode": (str, Ignored("the tokenizer is the one of the tokenizers library")),
    "tokenizer_revision": (str, Ignored("the tokenizer is that of the model's --revision")),
    "cpu_offload_gb": (float, Refused("weights are not offloaded; choose a smaller dtype or more ranks", (0,))),
    "data_parallel_size": (int, Refused("replicas are those of a fleet: --address and --min-replicas", (1,))),
    "enable_chunked_prefill": (bool, Refused("long prompts are always computed in chunks", (True,))),
    "generation_config": (str, Refused("the model's own applies; requests override it", ("auto",))),
    "hf_overrides": (str, Refused("the model is that of its config.json; change the file")),
    "load_format": (str, Refused("weights are read from safetensors files", ("auto", "safetensors"))),
    "override_generation_config": (str, Refused("change the model's generation_config.json")),
    "rope_scaling": (str, Refused("the model is that of its config.json; change the file")),
    "task": (str, Refused("--runner pooling serves embeddings and scores", ("auto", "generate"))),
    "tokenizer": (str, Refused("the tokenizer is that of the model", ("the model itself",))),
    "trust_remote_code": (bool, Refused("code of a model's directory is never run; drop the flag")),
}  # fmt: skip
SERVER_ARGUMENTS: Mapping[str, tuple[type, Treatment]] = {
    "host": (str, Renamed("http")),
    "port": (int, Renamed("http")),
    "ssl_certfile": (Path, Renamed("tls_cert")),
    "ssl_keyfile": (Path, Renamed("tls_key")),
    "chat_template_content_format": (str, Ignored("the form that the chat template reads is seen from it")),
    "disable_log_requests": (bool, Ignored("requests are not logged")),
    "disable_uvicorn_access_log": (bool, Ignored("requests are not logged")),
    "enable_log_requests": (bool, Ignored("requests are not logged")),
    "uvicorn_log_level": (str, Ignored(_ONE_LOG)),
    "response_role": (str, Refused("replies are the assistant's", ("assistant",))),
    "root_path": (str, Refused("let the proxy strip its prefix")),
}  # fmt: skip
VLLM_ARGUMENTS = {**ENGINE_ARGUMENTS, **SERVER_ARGUMENTS}

# option |-> vLLM's name of a value |-> quire's
_VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
}


def _declare(annotation: Any, treatment: Treatment) -> tuple[Any, Any]:
    if annotation is bool:
        return bool, option(False, help=treatment.words, group=GROUP)
    return annotation | None, option(None, help=treatment.words, group=GROUP)


VllmOptions = make_dataclass(
    "VllmOptions",
    [(name, *_declare(*argument)) for name, argument in VLLM_ARGUMENTS.items()],
    frozen=True,
    slots=True,
)
VllmOptions.__doc__ = "vLLM's arguments as command-line options."


def translate_arguments(given: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return given arguments under quire's names, with quire's names of values. One warning names the ignored ones.

    Args:
        given: options of quire and arguments of vLLM by name.
        model: the model directory.

    Raises:
        ConfigError: an argument is refused, or an option is given under both names.
    """
    options = {name: value for name, value in given.items() if name not in VLLM_ARGUMENTS}
    ignored = []
    for name, value in given.items():
        treatment = VLLM_ARGUMENTS[name][1] if name in VLLM_ARGUMENTS else None
        if isinstance(treatment, Ignored):
            ignored.append(f"{name} ({treatment.reason})")
        elif isinstance(treatment, Refused):
            _check_refused(name, value, treatment, model)
        elif isinstance(treatment, Members):
            for option_name, member in _read_members(name, value, treatment).items():
                _add_option(options, name, option_name, member)
        elif isinstance(treatment, Renamed) and treatment.option != "http":
            _add_option(options, name, treatment.option, treatment.convert(value))
    options |= _http_address(given, options)
    if ignored:
        _log.warning("ignored arguments of vLLM: %s", "; ".join(ignored))
    return {name: _translate_value(name, value) for name, value in options.items()}


def _add_option(options: dict[str, Any], name: str, option_name: str, value: Any) -> None:
    if option_name in options:
        raise ConfigError(f"{name} and {option_name} are the same option, must be given once")
    options[option_name] = value


def _read_members(name: str, value: Any, treatment: Members) -> dict[str, Any]:
    """Return quire's options of a JSON object, or of a mapping, as LLM takes it."""
    try:
        members = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}, must be a JSON object: {error}") from error
    if members is None:
        return {}
    if not isinstance(members, Mapping):
        raise ConfigError(f"{name} is {value!r}, must be a JSON object")
    known = {*treatment.options, *treatment.ignored}
    unknown = [str(member) for member in members if member not in known]
    if unknown:
        raise ConfigError(f"{name} has {unknown[0]!r}, must have {', '.join(sorted(known))}")
    given = {option: members.get(member) for member, option in treatment.options.items()}
    return {option: member for option, member in given.items() if member not in (None, "")}


def _check_refused(name: str, value: Any, treatment: Refused, model: str) -> None:
    if value is None or value in treatment.allowed or (value is False and True not in treatment.allowed):
        return
    if name == "tokenizer" and str(value) == model:
        return
    allowed = f", must be {' or '.join(map(str, treatment.allowed))}" if treatment.allowed else ""
    raise ConfigError(f"{name} is {value!r}{allowed}: {treatment.reason}")


def _http_address(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """Return the address of the HTTP server if vLLM's host or port is given."""
    host, port = given.get("host"), given.get("port")
    if host is None and port is None:
        return {}
    if "http" in options:
        raise ConfigError("host and port are the address that http sets, must be given once")
    host = "127.0.0.1" if host is None else host
    return {"http": f"{f'[{host}]' if ':' in host else host}:{8000 if port is None else port}"}


def _translate_value(name: str, value: Any) -> Any:
    names = _VALUES.get(name, {})
    return names.get(value, value) if isinstance(value, str) else value
