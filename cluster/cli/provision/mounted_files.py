"""Checks of the files that a cluster file copies to the nodes, on which the gateway would fail after their start."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ....proto.errors import ConfigError
from ...client.wire.tokens import load_tokens
from ...config.deployment import read_fleet_file
from ...config.tenants import load_tenants

_START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
_PEM_BEGIN = "-----BEGIN "


def mount_problems(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per local file that is missing, empty or malformed.

    Args:
        path: of the cluster file; relative paths begin at its folder.
        config: its settings.
    """
    needed = _paths_in_commands(config)
    for target, source in config.get("file_mounts", {}).items():
        local = path.parent / Path(source).expanduser()
        if not local.exists():
            yield f"file_mounts: {source} does not exist (relative paths begin at {path.parent})"
        elif local.is_dir():
            prefix = f"{target.rstrip('/')}/"
            for file in sorted(word.removeprefix(prefix) for word in needed if word.startswith(prefix)):
                yield from _file_problems(local / file)
        else:
            yield from _file_problems(local)


def _paths_in_commands(config: Mapping[str, Any]) -> set[str]:
    """Return the words of the nodes' start commands, some of which are paths of mounted files."""
    commands = [command for section in _START_COMMANDS for command in config.get(section, [])]
    words = set[str]()
    for command in commands:
        try:
            outer = shlex.split(command)
        except ValueError:  # unbalanced quotes; the shell will say so
            continue
        for word in outer:  # a quoted program, as of `sh -c`, holds words of its own
            words.update(part.strip(";'") for part in word.split())
    return words


def _file_problems(file: Path) -> Iterator[str]:
    if not file.is_file():
        yield f"{file} does not exist, and the gateway is started with it"
        return
    try:
        if not file.read_text().strip():
            yield f"{file} is empty"
            return
        check = _CHECKS.get(file.suffix or file.name)
        if check is not None:
            check(file)
    except ConfigError as error:
        yield str(error)
    except (OSError, UnicodeDecodeError) as error:
        yield f"{file} cannot be read: {error}"


def _check_toml(file: Path) -> None:
    if file.name == "fleet.toml":
        read_fleet_file(file)
    elif file.name == "tenants.toml":
        load_tenants(file)


def _check_pem(file: Path) -> None:
    if _PEM_BEGIN not in file.read_text():
        raise ConfigError(f"{file} is not a PEM file: it has no line that begins with {_PEM_BEGIN.strip()!r}")


# suffix or name of a file |-> its check, which raises ConfigError
_CHECKS: Mapping[str, Callable[[Path], object]] = {
    ".toml": _check_toml,
    "tokens": load_tokens,
    ".crt": _check_pem,
    ".key": _check_pem,
    ".pem": _check_pem,
}
