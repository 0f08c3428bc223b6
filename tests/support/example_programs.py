"""Programs of examples/, run as a user would run them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
# Runs programs in turn, each as `__main__` with its own arguments; to import torch and transformers takes 3 s.
_RUN_PROGRAMS = """
import contextlib, io, json, runpy, sys, traceback

for line in sys.stdin:
    sys.argv = json.loads(line)
    output, error = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except (Exception, SystemExit):
            error = traceback.format_exc()
    print(json.dumps([output.getvalue(), error]), flush=True)
"""

RunExample = Callable[..., str]


def run_alone(name: str, timeout_s: float = 180.0) -> str:
    """Return the output of a program of examples/ that needs a process of its own."""
    command = [sys.executable, str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@contextmanager
def example_runner() -> Iterator[RunExample]:
    """`run(name, *arguments) -> str`: the output of a program of examples/, in a process that the programs share."""
    with subprocess.Popen(
        [sys.executable, "-c", _RUN_PROGRAMS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(name: str, *arguments: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([str(EXAMPLES / name), *arguments]) + "\n")
            process.stdin.flush()
            output, error = json.loads(process.stdout.readline())
            assert not error, output + error
            return str(output)

        try:
            yield run
            process.communicate(timeout=60)  # the end of its input ends it
            assert process.returncode == 0
        finally:
            process.kill()
