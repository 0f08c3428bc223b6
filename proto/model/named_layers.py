"""Layers that lists in a quantization_config name. Imports no torch.

The lists are a checkpoint's data. A regular expression in them may be invalid, or take exponential time, so a process
with limits matches them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Of all patterns of a configuration. 420 regular expressions, one for each layer of a model, take 0.2 s.
MAX_CPU_S = 1
MAX_BYTES = 1 << 30
TIMEOUT_S = 60  # reached only if the process hardly runs
_PROGRAM = Path(__file__).with_name("match_patterns.py")


def first_naming(lists: Sequence[Sequence[str]], layers: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return layer |-> index of the first list that names it; without the layers that no list names.

    An entry of a list is the name of a layer, of a module that it is part of, or a part of its name; or the same with
    ``*`` for any text; or ``re:`` and a regular expression that a name matches from its beginning.

    Args:
        layers: layer |-> all names that it may have.

    Raises:
        ValueError: a pattern is invalid, or takes too long.
    """
    first_plain: dict[str, int] = {}
    patterns: dict[str, int] = {}
    for index, entries in enumerate(lists):
        for entry in entries:
            if entry.startswith("re:") or "*" in entry:
                patterns.setdefault(entry, index)
            else:
                first_plain.setdefault(entry.strip("."), index)
    found = _match(patterns, layers) if patterns else {}
    for layer, names in layers.items():
        indices = [first_plain[part] for name in names for part in _parts(name) if part in first_plain]
        if indices:
            found[layer] = min(found.get(layer, len(lists)), *indices)
    return found


def _match(patterns: Mapping[str, int], layers: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return layer |-> the value of the first of the patterns that matches one of its names."""
    lines = _run([list(patterns), list(layers.values())])
    keys = list(layers)
    found: dict[str, int] = {}
    for line, (pattern, value) in zip(lines, patterns.items(), strict=False):
        matched = json.loads(line)
        if isinstance(matched, str):
            raise ValueError(f"pattern {pattern!r:.100} is invalid: {matched}")
        found |= {keys[index]: value for index in matched}
    if len(lines) < len(patterns):
        pattern = list(patterns)[len(lines)]
        raise ValueError(
            f"pattern {pattern!r:.100} takes too long; all patterns may take {MAX_CPU_S} s and {MAX_BYTES >> 20} MiB"
        )
    return found


def _run(content: Any) -> list[str]:
    """Return the lines of the program, which are fewer than the patterns if it exceeds its limits."""
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(MAX_CPU_S), str(MAX_BYTES)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(content),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"its patterns were not matched within {TIMEOUT_S} s") from error
    return [line.removesuffix("\n") for line in done.stdout.splitlines(keepends=True) if line.endswith("\n")]


def _parts(name: str) -> list[str]:
    """Return the names that consist of adjacent parts of a name, which dots separate."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return [".".join(parts[start:end]) for end in ends for start in range(end)]
