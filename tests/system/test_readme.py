"""Examples and annotated tree of the README."""

import re
from pathlib import Path

import pytest

from quire.cluster.cli.demo.server import ServerProcess

README = Path(__file__).parents[2] / "README.md"


def python_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.cluster
def test_client_example_streams_an_output(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in python_examples() if "Client(" in code]
    assert len(example.strip().splitlines()) <= 10
    exec(compile(example.replace("127.0.0.1:50051", server.address), str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert len(printed) > 100
    assert "length" in printed or "stop" in printed


def test_offline_example_prints_an_output(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for code in python_examples() if "LLM(" in code]
    exec(compile(example, str(README), "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_annotated_tree_names_existing_paths() -> None:
    tree = re.search(r"```\nquire/\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert tree is not None
    folder = README.parent
    for line in tree.group(1).splitlines():
        name = line.strip("│├└─ ").split()[0]
        is_inside = line.startswith(("│", " "))
        if not is_inside:
            folder = README.parent / name
        path = folder / name if is_inside else folder
        assert path.exists(), f"{path} is in the README and not in the tree"
