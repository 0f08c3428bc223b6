"""Memory of a slot counted from the configuration, against that of a rank's slots."""

from __future__ import annotations

from typing import Any

import pytest
from state_kinds import STATE_KINDS

from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.model_source import describe_files
from quire.proto.config import LoraConfig
from quire.proto.model.registry import check_expert_parallel, check_supported
from quire.proto.model.target_modules import TargetModules
from quire.worker.models.slot_size import measure_slot
from quire.worker.models.weight_size import make_meta_model


@pytest.mark.parametrize(
    ("kind", "tp", "targets", "option"),
    [
        ("llama", 1, (), None),
        ("llama", 2, ("q_proj", "down_proj"), None),
        ("gemma2", 2, (), None),
        ("phi3", 1, (), None),
        ("qwen3_moe", 2, (), None),
        ("qwen3_moe", 1, ("up_proj",), None),
        ("qwen3_moe", 2, (), "enable_expert_parallel"),
        ("deepseek_v3", 2, (), None),
        ("deepseek_v3", 2, (), "enable_dp_attention"),
        ("deepseek_v3", 2, (), "all2all_backend"),
        ("lfm2", 2, (), None),
        ("qwen3_next", 1, (), None),
        ("bamba", 2, (), None),
        ("zamba", 2, (), None),
        ("kimi_linear", 2, (), None),
        ("qwen4_exp_text", 2, (), None),
        ("glm5_next_text", 2, (), None),
    ],
)
def test_slot_size_is_that_of_a_rank(
    kind: str, tp: int, targets: tuple[str, ...], option: str | None, make_model: Any, make_engine: Any
) -> None:
    folder, rank = make_model(kind, **STATE_KINDS.get(kind, {})), 8
    lora = LoraConfig(max_loras=2, max_lora_rank=rank, max_cpu_loras=2, lora_target_modules=",".join(targets))
    settings: dict[str, Any] = {} if option is None else {option: True}
    if option == "all2all_backend":
        settings = {option: "all_to_all", "enable_expert_parallel": True, "enable_dp_attention": True}
    engine = make_engine(folder, tp, num_blocks=8, lora=lora, **settings)
    actual = max(runner.memory.loaded.adapters.layers.slot_bytes for runner in engine.runners)
    model = describe_files(EngineOptions(str(folder)))
    size = measure_slot(make_meta_model(model), model.hf["hidden_size"], rank, TargetModules(targets))
    num_experts = 0
    if "enable_expert_parallel" in settings:
        num_experts = check_expert_parallel(model, check_supported(model, 1)).count
    # The ranks of the parts are not counted, 4 bytes each.
    found = size.rank_bytes(
        4,
        tp,
        num_experts,
        attention_ranks=1 if "enable_dp_attention" in settings else None,
        sends_tokens="all2all_backend" in settings,
    )
    assert found == pytest.approx(actual, rel=0.02)
