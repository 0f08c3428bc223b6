"""Values of options: kinds, with the forms in which people and files write them, and checks of what is allowed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..lora import MAX_LORA_NAME_CHARS, MAX_REGISTERED_LORAS

# (name, value) |-> the problem as one sentence; None if the value is allowed. The value is never None.
Check = Callable[[str, Any], str | None]

_MODULE = re.compile(r"\w+(\.\w+)*")
_MEDIA_DOMAIN = re.compile(r"(https?://)?[A-Za-z0-9.\-]{1,253}(:\d{1,5})?")
# Names of vLLM's --limit-mm-per-prompt, and its largest limit.
MEDIA_KINDS = ("image", "video", "audio")
MAX_IMAGES = 999
# Frames of a video: by default, and the largest limit, which is that of models' own sampling.
DEFAULT_FRAMES, MAX_FRAMES = 128, 768

_FLAGS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A type of option values.

    Attributes:
        words: the type in errors, after "must be".
        read: plain value from TOML, JSON, Python or the command line |-> value. Raises ValueError on a value of
            another type, ConfigError on text that cannot be parsed.
        split: text of an environment variable |-> plain value. Raises ValueError.
        write: value |-> plain value for JSON and TOML.
        cli_type: the command line's type of the plain value.
        is_repeated: the command line takes the option several times, once per entry.
    """

    words: str
    read: Callable[[Any], Any]
    split: Callable[[str], Any] = str
    write: Callable[[Any], Any] = lambda value: value
    cli_type: type = str
    is_repeated: bool = False


def _read_integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(value)
    return int(value)


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(value)
    return float(value)


def _read_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def _split_flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


def _read_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(value)


def _read_path(value: Any) -> Path:
    if isinstance(value, str | os.PathLike):
        return Path(value).absolute()  # for processes with another working directory
    raise ValueError(value)


def _read_object(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return _read_text(value)


def _read_names(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_read_text, value))
    return _read_text(value)


def _read_num_bytes(value: Any) -> int:
    return parse_num_bytes(value) if isinstance(value, str) else _read_integer(value)


INTEGER = ValueKind("a whole number", _read_integer, int, cli_type=int)
NUMBER = ValueKind("a number", _read_number, float, cli_type=float)
FLAG = ValueKind("true or false", _read_flag, _split_flag, cli_type=bool)
TEXT = ValueKind("text", _read_text)
PATH = ValueKind("a path", _read_path, write=str, cli_type=Path)
# A dictionary in Python and TOML, text elsewhere.
JSON_OBJECT = ValueKind("a JSON object", _read_object)
# A list in Python and TOML, text with commas elsewhere.
NAMES = ValueKind("names, separated by commas", _read_names)
NUM_BYTES = ValueKind("a number of bytes, or text like 512MiB or 8GB", _read_num_bytes)

# annotation |-> the kind of an option that names no other
KIND_OF: Mapping[Any, ValueKind] = {int: INTEGER, float: NUMBER, bool: FLAG, str: TEXT, Path: PATH}


def amounts(noun: str, example: str) -> ValueKind:
    """Return the kind of ``((name, number), ...)``, in TOML a table, elsewhere ``NAME=NUMBER`` texts.

    Args:
        noun: one entry in errors, for example ``tenant weight``.
        example: an entry, for example ``gold=3``.
    """

    def read(value: Any) -> tuple[tuple[str, float], ...]:
        entries = value.items() if isinstance(value, Mapping) else value
        if isinstance(entries, str | bytes):
            raise ValueError(value)
        return tuple(read_entry(entry) for entry in entries)

    def read_entry(entry: Any) -> tuple[str, float]:
        if isinstance(entry, str):
            return parse_amount(entry, noun, example)
        name, amount = entry
        return _read_text(name), _read_number(amount)

    return ValueKind(
        "a table of names and numbers", read, lambda text: text.split(","), dict, is_repeated=True
    )


def _read_modules(value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str | bytes):
        raise ValueError(value)
    entries = value.items() if isinstance(value, Mapping) else value
    return tuple(_read_module(entry) for entry in entries)


def _read_module(entry: Any) -> tuple[str, str]:
    if isinstance(entry, str) and entry.startswith("{"):
        given = json.loads(entry)
        entry = given.get("name"), given.get("path")
    elif isinstance(entry, str):
        name, equals, path = entry.partition("=")
        if not equals:
            raise ConfigError(f"adapter is {entry!r}, must be like sql=/adapters/sql")
        entry = name, path
    name, path = entry
    if not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(entry)
    return name, str(Path(path).expanduser().absolute()) if path else ""


# In TOML and Python a table, elsewhere NAME=PATH or vLLM's JSON object.
LORA_MODULES = ValueKind(
    "a table of names and paths", _read_modules, lambda text: text.split(","), dict, is_repeated=True
)


def parse_num_bytes(text: str) -> int:
    """Parse ``512MiB``, ``8GB`` or a plain number of bytes. Raises ConfigError on other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"amount of memory is {text!r}, must be like 512MiB, 8GB or 1000000")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parse_directory_size(text: str) -> tuple[str, int]:
    """Parse ``DIR:SIZE``, for example ``/var/cache/kv:200GB``: an absolute path, or the URL of a bucket, and bytes.

    Raises:
        ConfigError: it has another form.
    """
    directory, _, size = text.rpartition(":")
    if not directory:
        raise ConfigError(f"directory is {text!r}, must be DIR:SIZE, like /var/cache/kv:200GB")
    num_bytes = parse_num_bytes(size)
    if num_bytes < MIN_DIRECTORY_BYTES:
        raise ConfigError(f"size of {directory} is {size}, must be at least {MIN_DIRECTORY_BYTES >> 20}MiB")
    if directory.startswith(BUCKET_SCHEME):
        if not _BUCKET.fullmatch(directory):
            raise ConfigError(f"bucket is {directory!r}, must be s3://BUCKET or s3://BUCKET/PREFIX")
        return directory.rstrip("/"), num_bytes
    return str(Path(directory).expanduser().absolute()), num_bytes


def _read_directory_size(value: Any) -> str:
    path, num_bytes = parse_directory_size(_read_text(value))
    if path.startswith(BUCKET_SCHEME):
        raise ConfigError(f"directory is {path}, must be a directory of this host; kv_shared may be a bucket")
    return f"{path}:{num_bytes}"


def _read_place_size(value: Any) -> str:
    path, num_bytes = parse_directory_size(_read_text(value))
    return f"{path}:{num_bytes}"


def _read_file_name(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else _read_text(value)
    return str(Path(text).expanduser().absolute())


# A directory for a cache, and the most bytes that it may hold.
DIRECTORY_SIZE = ValueKind("DIR:SIZE, like /var/cache/kv:200GB", _read_directory_size)
# A directory or a bucket of an object store, likewise.
PLACE_SIZE = ValueKind("DIR:SIZE, like /mnt/kv:2TB, or s3://BUCKET/PREFIX:SIZE", _read_place_size)
# A path that the configuration carries to other processes as text.
FILE_NAME = ValueKind("the path of a file", _read_file_name)
# Begin of the URL of a bucket. Names of buckets have 3 to 63 characters; a prefix has no empty part.
BUCKET_SCHEME = "s3://"
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.=@+-]+)*/?")
# Room for a few files of blocks.
MIN_DIRECTORY_BYTES = 64 << 20


def parse_amount(text: str, noun: str, example: str) -> tuple[str, float]:
    """Parse ``NAME=NUMBER``.

    Args:
        noun: the subject of the error message.
        example: correct text, for the error message.

    Raises:
        ConfigError: the text has another form.
    """
    name, _, number = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(number)
    raise ConfigError(f"{noun} is {text!r}, must be like {example}")


@dataclass(frozen=True, slots=True)
class Range:
    """Values for which `holds` is true.

    Attributes:
        words: the condition after "must be", for example ``above 0``.
    """

    holds: Callable[[Any], bool]
    words: str

    def __call__(self, name: str, value: Any) -> str | None:
        return None if self.holds(value) else f"{name} is {show(value)}, must be {self.words}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A fixed set of texts."""

    choices: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str | None:
        return None if value in self.choices else f"{name} is {value!r}, must be {in_words(self.choices)}"


def positive_amounts(name: str, value: Sequence[tuple[str, float]]) -> str | None:
    """Check named numbers: each name once, each number finite and above 0."""
    names = [key for key, _ in value]
    for key, amount in value:
        if not key:
            return f"{name} has {show(amount)} without a name, must be NAME=NUMBER"
        if names.count(key) > 1:
            return f"{name} has {key!r} {names.count(key)} times, must have it once"
        if not 0 < amount < math.inf:
            return f"{name} has {show(amount)} for {key!r}, must be above 0 and finite"
    return None


def bearer_token(name: str, value: str) -> str | None:
    """Check a secret, without showing it."""
    if value and value.isascii() and value.isprintable() and " " not in value:
        return None
    return f"{name} is not usable as a token, must be printable ASCII text without spaces"


def web_origins(name: str, value: str) -> str | None:
    """Check the origins of web pages, separated by commas."""
    for origin in value.split(","):
        if origin != "*" and not re.fullmatch(r"https?://[^/\s*,]+", origin):
            return (
                f"{name} has {origin!r}, must be * or origins like https://example.com, separated by commas"
            )
    return None


def zmq_endpoint(name: str, value: str) -> str | None:
    """Check an address at which a ZeroMQ socket is bound."""
    match = re.fullmatch(r"zmq://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+|\*):([0-9]{1,5}|\*)", value)
    if match is None or (match[2] != "*" and not 0 < int(match[2]) < 1 << 16):
        return f"{name} is {value!r}, must be zmq://HOST:PORT; with * as the port, the system chooses it"
    return None


def image_limits(name: str, value: str) -> str | None:
    """Return why the limits of images and other media are not allowed; None if they are."""
    limits = _json_object(value)
    if limits is None:
        return f'{name} is {value!r}, must be a JSON object, for example {{"image": 4}}'
    for kind, given in limits.items():
        if kind not in MEDIA_KINDS:
            return f"{name} has {kind!r}, must have {in_words(MEDIA_KINDS)}"
        limit: Mapping[str, Any] = given if isinstance(given, Mapping) else {"count": given}
        for key, most in (("count", MAX_IMAGES), ("num_frames", MAX_FRAMES)):
            number = limit.get(key, 0)
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
                what = kind if key == "count" else f"{key} of {kind}"
                return f"{name}: {what} is {number!r}, must be a whole number from 0 to {most}"
    return None


def json_object(name: str, value: str) -> str | None:
    """Return why the text is no JSON object; None if it is."""
    return None if _json_object(value) is not None else f"{name} is {value!r}, must be a JSON object"


def _json_object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def media_domains(name: str, value: str) -> str | None:
    """Return why the names of hosts are not allowed; None if they are."""
    for host in value.split(","):
        if not _MEDIA_DOMAIN.fullmatch(host):
            return (
                f"{name} has {host!r}, must be the name of a host like images.example.com, with http:// before it if "
                "it may be read without TLS"
            )
    return None


def processor_names(name: str, value: str) -> str | None:
    """Check names of logits processors, separated by commas."""
    names = value.split(",")
    for each in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", each):
            return f"{name} has {each!r}, must be a name of up to 64 letters, digits, '_', '.' and '-'"
        if names.count(each) > 1:
            return f"{name} has {each!r} {names.count(each)} times, must have it once"
    return None


def check_lora_modules(name: str, value: Sequence[tuple[str, str]]) -> str | None:
    """Return why adapters are not allowed; None if they are. A check of the option."""
    if len(value) > MAX_REGISTERED_LORAS:
        return f"{name} has {len(value)} adapters, must have at most {MAX_REGISTERED_LORAS}"
    names = [key for key, _ in value]
    for key, path in value:
        if not 1 <= len(key) <= MAX_LORA_NAME_CHARS or not path:
            return f"{name} has {key!r} in {path!r}, must be NAME=PATH"
        if names.count(key) > 1:
            return f"{name} has {key!r} {names.count(key)} times, must have it once"
    return None


def check_target_modules(name: str, value: str) -> str | None:
    """Return why target modules are not allowed; None if they are. A check of the option."""
    if not all(_MODULE.fullmatch(each) for each in value.split(",")):
        return f"{name} is {value!r}, must be names of modules separated by commas, like q_proj,mlp.experts"
    return None


positive = Range(lambda value: value > 0, "above 0")
positive_finite = Range(lambda value: 0 < value < math.inf, "above 0 and finite")
not_negative_finite = Range(lambda value: 0 <= value < math.inf, "at least 0 and finite")
share = Range(lambda value: 0 < value <= 1, "above 0 and at most 1")


def at_least(low: int) -> Range:
    return Range(lambda value: bool(value >= low), f"at least {low}")


def positive_up_to(high: int) -> Range:
    return Range(lambda value: bool(0 < value <= high), f"above 0 and at most {high}")


def between(low: float, high: float) -> Range:
    return Range(lambda value: bool(low <= value <= high), f"from {low:g} to {high:g}")


def one_of(*choices: str) -> OneOf:
    return OneOf(choices)


def show(value: Any) -> str:
    """Return the value as errors show it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def in_words(choices: Sequence[str]) -> str:
    """Return ``a, b or c``."""
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
