"""Deployments cross the network unchanged, and no option can be forgotten in admin.proto."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

import pytest

from quire import Deployment, EngineOptions, ScalingLimits
from quire.cluster.client.wire.admin_messages import deployment_from_message, deployment_to_message
from quire.proto import admin_pb2
from quire.proto.errors import ConfigError
from quire.proto.options.option import declared_options
from quire.proto.options.values import OneOf

MESSAGES = [
    (EngineOptions, admin_pb2.EngineOptions),
    (ScalingLimits, admin_pb2.ScalingLimits),
    (Deployment, admin_pb2.Deployment),
]
OTHER_VALUES: dict[Any, Any] = {str: "x", int: 3, float: 0.5, tuple: (("gold", 2.0), ("a", 1.0))}


def other_value(kind: type, field: Field[Any]) -> Any:
    """A valid value that is not the field's default."""
    if field.name in ("min_replicas", "max_replicas"):
        return {"min_replicas": 2, "max_replicas": 5}[field.name]
    if field.name == "speculative_config":
        return '{"method": "ngram"}'
    if field.name in ("limit_mm_per_prompt", "mm_processor_kwargs"):
        return '{"image": 3}'
    if field.name in ("kv_events", "kv_events_replay"):
        return "zmq://127.0.0.1:5557"
    if field.name in ("kv_disk", "kv_shared"):
        return "/var/cache/kv:64000000000"
    if field.name == "kv_key":
        return "/etc/quire/kv.key"
    if field.name == "lora_modules":
        return (("sql", "/adapters/sql"),)
    declared = declared_options(kind).get(field.name)
    if declared is not None and isinstance(declared.check, OneOf):
        return declared.check.choices[-1]
    hint = get_type_hints(kind)[field.name]
    for candidate in (getattr(hint, "__origin__", None), hint, *getattr(hint, "__args__", ())):
        if candidate is bool:
            return not field.default
        if candidate in OTHER_VALUES:
            return OTHER_VALUES[candidate]
    raise AssertionError(f"no value for {field.name}: {hint}")


@pytest.mark.parametrize(("kind", "message"), MESSAGES)
def test_message_has_the_fields_of_the_dataclass(kind: type, message: Any) -> None:
    assert set(message.DESCRIPTOR.fields_by_name) == {field.name for field in fields(kind)}


def test_deployment_keeps_every_changed_field() -> None:
    engine = {field.name: other_value(EngineOptions, field) for field in fields(EngineOptions)}
    limits = {field.name: other_value(ScalingLimits, field) for field in fields(ScalingLimits)}
    for kind, values in ((EngineOptions, engine), (ScalingLimits, limits)):
        assert all(values[field.name] != field.default for field in fields(kind))
    deployment = Deployment(
        EngineOptions(**engine),
        ScalingLimits(**limits),
        rank_resources=(("slot", 1.5), ("CPU", 4.0)),
        drain_grace_s=4.25,
        spot="prefer",
        weights_version="2",
    )
    message = admin_pb2.Deployment.FromString(deployment_to_message(deployment).SerializeToString())
    received = deployment_from_message(message)
    assert received == deployment
    assert received.version == deployment.version


def test_unset_fields_take_the_defaults() -> None:
    message = admin_pb2.Deployment(engine=admin_pb2.EngineOptions(model="demo"))
    assert deployment_from_message(message) == Deployment(EngineOptions("demo"))


def test_values_equal_to_zero_are_not_taken_for_unset() -> None:
    engine = EngineOptions("demo", prefix_caching=False, seed=0, served_model_name="")
    deployment = Deployment(engine, ScalingLimits(min_replicas=0, cooldown_s=0.0), drain_grace_s=0.0)
    assert deployment_from_message(deployment_to_message(deployment)) == deployment


def test_missing_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.model is empty"):
        deployment_from_message(admin_pb2.Deployment())


def test_value_out_of_its_range_is_refused() -> None:
    message = admin_pb2.Deployment(
        engine=admin_pb2.EngineOptions(model="demo"), limits=admin_pb2.ScalingLimits(target_use=2.0)
    )
    with pytest.raises(ConfigError, match="target_use is 2"):
        deployment_from_message(message)


def test_value_that_no_message_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        deployment_to_message(Deployment(EngineOptions("demo", seed=1 << 70)))


def test_only_the_model_is_required() -> None:
    required = [field.name for field in fields(EngineOptions) if field.default is MISSING]
    assert required == ["model"]
