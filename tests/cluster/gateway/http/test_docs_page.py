"""The examples of docs/http.md against a server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from deadlines import PROGRAM_TIMEOUT_S
from local_server import ThreadedServer

PAGE = (Path(__file__).parents[4] / "docs" / "http.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"```(sh|python)\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("language", "code"), BLOCKS, ids=[f"{language}-{n}" for n, (language, _) in enumerate(BLOCKS)]
)
def test_example_runs(
    server: ThreadedServer, language: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = code.replace("http://127.0.0.1:8000", server.url).replace('"demo"', '"tiny"')
    if language == "sh":
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True
        )
        assert '"usage"' in done.stdout, done.stdout
    else:
        exec(compile(code, "docs/http.md", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_page_names_every_endpoint(server: ThreadedServer) -> None:
    assert server.server.http is not None
    for path in server.server.http.app.openapi()["paths"]:
        assert f"`{path.replace('{model}', '{id}').replace('{response_id}', '{id}')}`" in PAGE, path
