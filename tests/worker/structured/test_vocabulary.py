"""The vocabulary of a model directory, read with and without transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.config.engine_options import DEMO_MODEL_PATH
from quire.proto.errors import ConfigError
from quire.worker.structured import vocabulary
from quire.worker.structured.vocabulary import Vocabulary, read_vocabulary

SIZE = 3080


def read(folder: Path) -> Vocabulary:
    return read_vocabulary(str(folder), SIZE, (0,))


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., Path]:
    """`change(name=value, ...)` copies the demo model's tokenizer with other settings, and returns the folder."""

    def copy(**settings: Any) -> Path:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(DEMO_MODEL_PATH / name, tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | settings))
        return tmp_path

    return copy


NEW = {"3072": {"content": "<|new|>", "special": True}}
SETTINGS: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "another special token": {"pad_token": " the"},
    "a token that tokenizer.json lacks": {"added_tokens_decoder": NEW},
    "named special tokens": {"extra_special_tokens": {"image_token": "<|endoftext|>"}},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_vocabulary_is_that_of_transformers(
    case: str, change: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = change(**SETTINGS[case])
    found = read(folder)
    monkeypatch.setattr(vocabulary, "read_without_transformers", lambda folder: None)
    expected = read(folder)
    assert found.pieces == expected.pieces
    assert found.special_ids == expected.special_ids
    for text in ("It was {a, 17}", "<|endoftext|> the sea"):
        assert found.encode(text) == expected.encode(text)


def test_first_constraint_of_a_rank_does_not_import_transformers() -> None:
    """The import takes seconds on a busy machine, and a step waits for the vocabulary."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from quire.worker.structured.compilation import GUIDANCE, GrammarLibrary\n"
        f"GrammarLibrary({str(DEMO_MODEL_PATH)!r}, 3072, (0,)).prepare(GUIDANCE)\n"
        "print('transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.strip() == "False"


def test_tokenizer_that_cannot_be_read_is_refused(change: Callable[..., Path]) -> None:
    folder = change()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        read(folder)
