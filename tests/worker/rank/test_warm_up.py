"""No kernel variant is compiled after a rank is ready."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from draft_heads import add_mtp

from quire.proto.step import RowSampling
from quire.worker.rank.warm_up import warm_up_plans

SCRIPT = Path(__file__).parents[2] / "support" / "count_variants.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        ("llama", ""),
        ("llama", "eager"),
        ("llama", "lora"),
        ("llama", "structured"),
        ("llama", "int8_kv"),
        ("llama", "ngram"),
        ("llama", "draft_model"),
        ("llama", "eagle3"),
        ("llama", "mtp"),
        ("gemma2", ""),
        ("qwen3_moe", ""),
        ("deepseek_v3", ""),
    ],
)
def test_no_variant_is_compiled_after_ready(make_model: Any, tmp_path: Path, kind: str, feature: str) -> None:
    """A random load on a stand-in GPU, whose launches go through Triton's binder."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(SCRIPT.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    model = make_model(kind, num_hidden_layers=3 if feature == "eagle3" else 2)
    if feature == "mtp":
        model = add_mtp(model, tmp_path / "with-head", mimo=False)
    command = [sys.executable, str(SCRIPT), str(model), feature]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    (ready,) = [line for line in done.stdout.splitlines() if not line.startswith("variant")]
    assert int(ready.split()[1]) > 20


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 1}, {"max_model_len": 2, "block_size": 1}, {"num_blocks": 3, "block_size": 2}],
    ids=str,
)
def test_warm_up_leaves_no_sequences(
    make_model: Any, make_engine: Any, planned: Any, settings: dict[str, Any]
) -> None:
    """Requests get the tokens that they get without a warm-up."""
    num_blocks = settings.get("num_blocks", 64)
    engine = make_engine(make_model("llama"), **settings)
    (runner,) = engine.runners
    for plan in warm_up_plans(engine.config, num_blocks):
        runner.launch(plan).result()
    assert runner.memory.rows.tables.digest == 0
    assert not runner.memory.rows.decoding.any()
    warm = planned([7], 1, RowSampling(temperature=0.0))
    engine.generate([warm])
    cold = planned([7], 1, RowSampling(temperature=0.0))
    make_engine(make_model("llama"), **settings).generate([cold])
    assert warm.generated == cold.generated
