"""Programs in examples/ run as a user would run them, without a server; see also test_server_examples.py."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from example_programs import EXAMPLES, RunExample

from quire.cluster.config.deployment import read_fleet_file

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def test_offline_prints_a_completion_for_every_prompt(run_example: RunExample) -> None:
    printed = run_example("offline.py")
    assert printed.count("->") == 3
    assert printed.count("log-probability -") == 3


def test_speculative_decoding_gives_the_same_text(run_example: RunExample) -> None:
    assert "same text with drafts" in run_example("speculative_decoding.py")


def test_reinforcement_learning_names_the_weights(run_example: RunExample) -> None:
    first, second = run_example("reinforcement_learning.py").splitlines()
    assert first.startswith("initial: [")
    assert second.startswith("step-1: [")
    assert first.removeprefix("initial") == second.removeprefix("step-1")  # the weights are the same


def test_custom_logits_processor_is_found_as_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = EXAMPLES / "logits_processor"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = tmp_path / "quire_even_tokens-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    ((name, value),) = project["entry-points"]["quire.logits_processors"].items()
    (info / "entry_points.txt").write_text(f"[quire.logits_processors]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(package)
    monkeypatch.syspath_prepend(tmp_path)
    program = EXAMPLES / "custom_logits_processor.py"
    monkeypatch.setattr(sys, "argv", [str(program)])
    runpy.run_path(str(program), run_name="__main__")
    _, even = map(json.loads, capsys.readouterr().out.splitlines())
    assert not any(token % 2 for token in even)


def test_scoring_prefers_the_likelier_answer(run_example: RunExample) -> None:
    printed = run_example("scoring.py")
    scores = {
        answer: float(score)
        for score, answer in re.findall(r"^([+-]\d+\.\d\d) per token: (.*)$", printed, re.M)
    }
    assert scores["the refrigerator."] < scores["the captain."] < 0
    (perplexity,) = re.findall(r"^perplexity (\d+\.\d): It was", printed, re.M)
    assert 1 < float(perplexity) < 1000


def test_embeddings_rank_every_text(run_example: RunExample) -> None:
    printed = run_example("embeddings.py")
    assert re.match(r"\d+ dimensions\n", printed)
    scores = [float(score) for score in re.findall(r"^([+-][01]\.\d{3}) ", printed, re.MULTILINE)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_repetition_guard_ends_outputs(run_example: RunExample) -> None:
    without, guarded = run_example("repetition_guard.py").splitlines()
    assert "repetition" not in without
    assert "repetition" in guarded
    assert int(re.findall(r"\d+", guarded)[0]) < int(re.findall(r"\d+", without)[0])


def test_thinking_budget_ends_the_reasoning(run_example: RunExample) -> None:
    printed = run_example("thinking_budget.py")
    outputs = re.findall(r"^budget (\w+): (\d+) tokens of reasoning, answer (.*)$", printed, re.MULTILINE)
    lens = {budget: int(num_tokens) for budget, num_tokens, _ in outputs}
    assert lens["6"] <= 7 < lens["24"] <= 25 < lens["None"]
    assert [answer == "None" for _, _, answer in outputs] == [True, False, False]


def test_structured_outputs_have_their_forms(run_example: RunExample) -> None:
    printed = run_example("structured_outputs.py")
    assert re.search(r"^choice: (calm|stormy) \(stop\)$", printed, re.MULTILINE)
    assert re.search(r"^grammar: [a-h][1-8]-[a-h][1-8]", printed, re.MULTILINE)
    assert printed.startswith('schema: {"ship":')


def test_rag_answers_from_the_nearest_passages(run_example: RunExample) -> None:
    question = "It rains on the fields in the north."  # is a passage itself
    first, second, answer, *_ = run_example("rag.py", "demo", question).splitlines()
    assert first == f"source +1.000 {question}"
    assert second.startswith("source ")
    assert answer.startswith("answer: ")


def test_lora_adapters_give_different_texts(run_example: RunExample) -> None:
    lines = run_example("lora.py").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["no adapter", "red", "blue"]
    assert len({line.partition(":")[2] for line in lines}) == 3


def test_chat_answers_every_question(run_example: RunExample, demo_model_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(demo_model_dir, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    printed = run_example("chat.py", str(model))
    assert printed.count("user: ") == 2
    assert printed.count("assistant: ") >= 2


def test_autoscaling_follows_the_load_and_draws_it(run_example: RunExample, tmp_path: Path) -> None:
    printed = run_example("autoscaling.py", str(tmp_path / "scaling.png"))
    assert "12 at most" in printed
    share = re.search(r"waits within 5 s: ([\d.]+)%", printed)
    assert share is not None
    assert float(share[1]) > 99
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_cells_of_the_notebook_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])  # outputs would hide changes
    names: dict[str, Any] = {}
    printed = []
    for number, cell in enumerate(cells):
        exec(compile(cell, f"notebook.ipynb, cell {number}", "exec"), names)
        printed.append(capsys.readouterr().out)
    completions, likely, cached, chat = (text.strip().splitlines() for text in (*printed[1:4], printed[4]))
    assert [line.count("->") for line in completions] == [1, 1, 1]
    assert len(likely) == 4
    first, second = (int(line.split(" - ")[1].split()[0]) for line in cached)
    assert first == 0 < second
    assert chat


def test_fleet_file_holds_two_models_with_limits_of_their_own() -> None:
    small, large = read_fleet_file(EXAMPLES / "fleet.toml")
    assert (small.name, small.limits.max_replicas) == ("small", 3)
    assert (large.name, large.limits.min_replicas, large.engine.tensor_parallel_size) == ("large", 0, 2)


def test_readme_lists_every_example() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    missing = [path.name for path in EXAMPLES.iterdir() if path.is_file() and f"]({path.name})" not in listed]
    assert missing == ["README.md"]
