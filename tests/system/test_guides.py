"""Code, commands, options, metrics and messages on the pages of docs/ are those of quire."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from chat_model import PARSERS, chat_model
from deadlines import PROGRAM_TIMEOUT_S
from local_server import ThreadedServer, threaded_server

from quire.cluster import cli
from quire.cluster.config.deployment import Deployment, ScalingLimits
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.server_options import ServerOptions
from quire.cluster.config.tenants import load_tenants
from quire.proto.errors import ERRORS
from quire.proto.options.option import declared_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Generated, or run by tests of their own.
ELSEWHERE = {"http.md", "vllm.md", "benchmarks.md", "metrics.md"}
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
BLOCKS = [
    pytest.param(page, language, code, id=f"{page}-{language or 'commands'}-{number}")
    for page, text in PAGES.items()
    if page not in ELSEWHERE
    for number, (language, code) in enumerate(
        re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    )
]
# Programs that the pages use beside quire.
PROGRAMS = {
    "curl", "docker", "helm", "install", "journalctl", "kubectl", "openssl", "pip", "python3", "ray",
    "systemctl", ".", "/opt/quire/bin/pip",
}  # fmt: skip
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def server(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreadedServer]:
    model = chat_model(make_model("llama"), tmp_path_factory.mktemp("model"))
    with threaded_server(model, **PARSERS) as server:
        yield server


def of_server(code: str, server: ThreadedServer) -> str:
    """Return the code with the server's addresses, and its model in place of demo in requests to it."""
    code = code.replace("http://127.0.0.1:8000", server.url).replace("127.0.0.1:50051", server.server.target)
    return code if "LLM(" in code else code.replace('"demo"', '"tiny"')


@pytest.mark.parametrize(
    ("page", "language", "code"), [each for each in BLOCKS if each.values[1] == "python"]
)
def test_python_runs(
    page: str, language: str, code: str, server: ThreadedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(of_server(code, server), page, "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("page", "language", "code"), [each for each in BLOCKS if each.values[1] == "sh"])
def test_shell_runs(page: str, language: str, code: str, server: ThreadedServer) -> None:
    command = ["bash", "-euc", of_server(code, server)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True)
    assert '"choices"' in done.stdout


@pytest.mark.parametrize(("page", "language", "code"), [each for each in BLOCKS if each.values[1] == ""])
def test_commands_parse(page: str, language: str, code: str) -> None:
    if page in {"architecture.md", "glossary.md"} or "──" in code:
        return  # drawings
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.partition(" >")[0], comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):  # variables of the command
            del words[0]
        if words[:1] == ["quire"] and words[1:2] != ["--help"]:
            with COMMANDS[words[1]].make_context(words[1], words[2:]):
                pass
        elif words and words[0] != "quire":
            assert words[0] in PROGRAMS, line
        if words[:1] == ["docker"] and "serve" in words:
            serve = words[words.index("serve") + 1 :]
            with COMMANDS["serve"].make_context("serve", serve):
                pass


@pytest.mark.parametrize(("page", "language", "code"), [each for each in BLOCKS if each.values[1] == "toml"])
def test_toml_is_a_file_that_is_read(page: str, language: str, code: str, tmp_path: Path) -> None:
    content = tomllib.loads(code)
    if "project" in content:  # of a package with an entry point; an example is such a package
        assert content["project"].keys() == {"entry-points"}
    elif "model" in content:
        for table in content["model"]:
            Deployment.from_table(table)
    else:
        path = tmp_path / "tenants.toml"
        path.write_text(code)
        load_tenants(path)


@pytest.mark.parametrize(("page", "language", "code"), [each for each in BLOCKS if each.values[1] == "yaml"])
def test_yaml_is_read(page: str, language: str, code: str) -> None:
    assert yaml.safe_load(code)  # `make test-deploy` renders the chart with it


@pytest.mark.parametrize(("page", "language", "code"), [each for each in BLOCKS if each.values[1] == "ini"])
def test_variables_are_options(page: str, language: str, code: str) -> None:
    options = {**declared_options(EngineOptions), **declared_options(ServerOptions)}
    known = {option.variable for option in options.values()} | {"HF_TOKEN", "QUIRE_MODEL"}
    assert {line.partition("=")[0] for line in code.splitlines()} <= known


def test_every_block_has_a_test() -> None:
    outputs = {"text"}
    assert {each.values[1] for each in BLOCKS} - outputs <= {"", "python", "sh", "toml", "yaml", "ini"}


@cache
def flags() -> set[str]:
    """Return every option of every command."""
    return {
        flag
        for command in COMMANDS.values()
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--")
    }


@pytest.mark.parametrize("page", ["sglang.md", "llama_cpp.md"])
def test_flags_in_the_right_column_exist(page: str) -> None:
    rows = re.findall(r"^\| `-.*? \| (.*) \|$", PAGES[page], re.MULTILINE)
    assert len(rows) > 20
    named = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)}
    assert named - flags() == set()


@pytest.mark.parametrize(
    "page", ["tuning.md", "limits.md", "troubleshooting.md", "faq.md", "operations.md", "fleet_reference.md"]
)
def test_flags_of_the_page_exist(page: str) -> None:
    named = set(re.findall(r"`(--[a-z][\w-]+)", PAGES[page]))
    of_others = {"--help", "--ipc", "--shm-size"}
    assert named
    assert named - flags() - of_others == set()


def test_keys_for_ray_serve_are_options() -> None:
    rows = re.findall(
        r"^\| `[\w.]+.*? \| (.*) \|$", PAGES["ray_serve.md"].partition("## Commands")[0], re.MULTILINE
    )
    owners = (EngineOptions, ScalingLimits, Deployment)
    known = {each.name for owner in owners for each in fields(owner)}
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 8
    assert named - known == set()


@pytest.mark.parametrize(
    "page", [page for page, text in PAGES.items() if "`vllm:" in text or "`quire_" in text]
)
def test_metrics_of_the_page_exist(page: str) -> None:
    if page == "metrics.md":
        return
    known = set(re.findall(r"`((?:vllm:|quire_)\w+)`", PAGES["metrics.md"]))
    here = re.sub(
        r"^\| `vllm:.*? \| ", "| ", PAGES[page], flags=re.MULTILINE
    )  # vLLM's own names, on the left
    named = set(re.findall(r"((?:vllm:|quire_)[a-z0-9_]+)(?![a-z0-9_*])", here))
    assert {name for name in named if not name.endswith("_")} - known == set()


def literals() -> Iterator[str]:
    """Yield the texts in quire's source. A value in an f-string is an ellipsis."""
    for folder in ("cluster", "worker", "scheduler", "proto", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if "_pb2" not in path.name:
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.JoinedStr):
                        yield "".join(
                            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                        )
                    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield re.sub(r"%(?:\.\d)?[sdg]", "…", node.value)


# Messages of gRPC and of HTTP clients, which the page explains too.
OF_OTHERS = {
    "Trying to connect an http1.x server",
    "Received HTTP/0.9 when not allowed",
    "illegal status line",
}


def messages() -> list[str]:
    """Return quire's messages that the page on troubleshooting explains."""
    tables = re.findall(r"^\| (`.*?`)(?:, (`.*?`))? \| ", PAGES["troubleshooting.md"], re.MULTILINE)
    found = [message[1:-1] for row in tables for message in row if message]
    return [message for message in found if message not in OF_OTHERS]


def test_page_explains_messages_that_exist() -> None:
    text = "\n".join(literals())
    # A value may be a text of its own in the source, so each part between two values is looked up.
    missing = [
        message
        for message in messages()
        if not all(part.strip(" ;,") in text for part in message.split("…") if len(part.strip(" ;,")) > 2)
    ]
    assert len(messages()) > 40
    assert missing == []


def test_page_has_a_section_for_each_reason() -> None:
    sections = re.findall(r"^## ([A-Z_]+)$", PAGES["troubleshooting.md"], re.MULTILINE)
    assert sections == list(dict.fromkeys(sections))
    assert set(sections) == set(ERRORS)


def test_navigation_names_pages_that_exist() -> None:
    def names(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for each in node.values() if isinstance(node, dict) else node:
                yield from names(each)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert {name for name in names(nav) if name not in PAGES} == set()
