"""The instruction set of a rank on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from quire.proto.errors import ConfigError


def test_unknown_instruction_set_is_config_error(
    make_model: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama")
    monkeypatch.setenv("QUIRE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="QUIRE_CPU_ISA is 'sse9', must be one of"):
        make_engine(folder, 1)
