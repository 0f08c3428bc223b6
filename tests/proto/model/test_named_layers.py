"""Layers that lists of a quantization_config name, by patterns that may be invalid or take exponential time."""

from __future__ import annotations

import fnmatch

import pytest

from quire.proto.model import named_layers
from quire.proto.model.named_layers import first_naming

LAYERS = [f"model.layers.{index}.{part}" for index in range(12) for part in ("attn.q_proj", "mlp.up_proj")]
NAMES = {layer: [layer, f"language_model.{layer}"] for layer in LAYERS}


def named(*entries: str) -> set[str]:
    return set(first_naming([entries], NAMES))


@pytest.mark.parametrize(
    "entry", ["model.layers.1", "layers.1.", "layers.1.attn", "attn.q_proj", "up_proj", "model", LAYERS[3]]
)
def test_entry_names_layers_by_adjacent_parts_of_their_names(entry: str) -> None:
    expected = {layer for layer in LAYERS if f".{entry.strip('.')}." in f".{layer}."}
    assert named(entry) == expected != set()


@pytest.mark.parametrize(
    "entry", ["layers", "odel.layers.1", "layers.1.attn.", "", ".", "layers..1", "q", "re:q"]
)
def test_entry_that_is_only_a_piece_of_a_part_names_no_layer(entry: str) -> None:
    expected = {layer for layer in LAYERS if f".{entry.strip('.')}." in f".{layer}."}
    assert named(entry) == expected


@pytest.mark.parametrize(
    "entry", ["model.layers.1.*", "*.layers.1*", "*attn", "model.layers.1?.*", "language_model.*3*"]
)
def test_entry_with_wildcards_names_layers_and_modules(entry: str) -> None:
    expected = {
        layer
        for layer, names in NAMES.items()
        for name in names
        if fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, f"{entry}.*")
    }
    assert named(entry) == expected != set()


def test_expression_matches_from_the_beginning_of_a_name() -> None:
    assert named(r"re:model\.layers\.1\.") == {
        layer for layer in LAYERS if layer.startswith("model.layers.1.")
    }
    assert named(r"re:language_model.*\.1\.") == named("layers.1")
    assert named(r"re:layers\.1\.") == set()


def test_first_list_that_names_a_layer_wins() -> None:
    lists = [
        ["re:.*layers.3.*"],
        ["layers.3.attn", "layers.4"],
        [],
        ["*.attn.q_proj", "layers.4"],
        ["up_proj"],
    ]
    found = first_naming(lists, NAMES)
    assert found["model.layers.3.attn.q_proj"] == 0
    assert found["model.layers.4.attn.q_proj"] == 1
    assert found["model.layers.5.attn.q_proj"] == 3
    assert found["model.layers.5.mlp.up_proj"] == 4


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("(", "pattern 're:\\(' is invalid: missing \\)"),
        ("*", "is invalid: nothing to repeat"),
        ("a{99999999999999999999}", "is invalid: the repetition number is too large"),
        ("(" * 2000 + ")" * 2000, "is invalid: maximum recursion depth exceeded"),
    ],
)  # fmt: skip
def test_invalid_expression_is_named(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        named("up_proj", "re:.*", f"re:{expression}")


def test_expression_that_takes_exponential_time_is_named() -> None:
    problem = r"pattern 're:\(\.\*\.\*\)\*x\$' takes too long; all patterns may take 1 s and 1024 MiB"
    with pytest.raises(ValueError, match=problem):
        named("up_proj", r"re:.*\.1\.q", "re:(.*.*)*x$", "re:(")


def test_patterns_share_one_limit_of_time() -> None:
    """10,000 expressions, each of which compiles in milliseconds."""
    patterns = [f"re:{index}{'(a|b)+' * 200}" for index in range(10_000)]
    with pytest.raises(ValueError, match="takes too long"):
        named(*patterns)


def test_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_layers, "TIMEOUT_S", 0)
    with pytest.raises(ValueError, match="its patterns were not matched within 0 s"):
        named("re:.*")


def test_characters_that_are_no_text_match_nothing() -> None:
    assert named("re:\ud800", "re:\x00", "*\ud800") == set()
