"""Commands and fleet file of docs/operations.md."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from quire.cluster import cli
from quire.cluster.config.deployment import Deployment

GUIDE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line for kind, text in BLOCKS if not kind for line in text.splitlines() if line.startswith("quire ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_the_guide_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line.partition(" >")[0], comments=True)
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, arguments):
        pass


def test_guide_shows_every_command_that_operates_a_cluster() -> None:
    assert {line.split()[1] for line in COMMANDS} >= {
        "up",
        "down",
        "serve",
        "deploy",
        "drain",
        "delete",
        "status",
        "health",
    }


def test_fleet_file_of_the_guide_loads() -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "toml"]
    qwen, llama = map(Deployment.from_table, tomllib.loads(text)["model"])
    assert (qwen.name, llama.name) == ("qwen3", "llama")
    assert (llama.limits.min_replicas, llama.engine.tensor_parallel_size) == (0, 8)
