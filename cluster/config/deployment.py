"""Deployment: a model as a fleet is to serve it, and the fleet files that hold several.

A fleet file is TOML: a ``[[model]]`` table a model, whose entries are the options of `quire serve` with underscores.

    [[model]]
    model = "/models/qwen3-8b"
    served_model_name = "qwen3"
    tensor_parallel_size = 2
    min_replicas = 1
    max_replicas = 4
    target_wait_s = 2.0
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, get_type_hints

from ...proto.config import EngineConfig
from ...proto.errors import ConfigError
from .engine_options import EngineOptions
from .resolve import DEMO_MODEL, Machine
from .scaling_limits import ScalingLimits
from .units import parse_num_bytes

MAX_DRAIN_GRACE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What an operator wants of one model.

    Attributes:
        limits: how many replicas, and when more or fewer.
        rank_resources: Ray resources that each rank takes beside its CPU, and its GPU where it computes on one.
        drain_grace_s: how long running requests may stay at a replica that drains, before they are moved.
        revision: any text; another one makes another version where no option differs, for weights changed in place.
    """

    engine: EngineOptions
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    rank_resources: Mapping[str, float] = field(default_factory=dict)
    drain_grace_s: float = 30.0
    revision: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.drain_grace_s <= MAX_DRAIN_GRACE_S:
            raise ConfigError(
                f"drain_grace_s is {self.drain_grace_s:g}, must be from 0 to {MAX_DRAIN_GRACE_S:g}"
            )
        for name, amount in self.rank_resources.items():
            if not name or amount <= 0:
                raise ConfigError(
                    f"rank_resources has {amount:g} of {name!r}, must have more than 0 of a name"
                )

    @property
    def name(self) -> str:
        """What clients call the model."""
        model = self.engine.model
        return self.engine.served_model_name or (
            model if model == DEMO_MODEL else Path(model).expanduser().resolve().name
        )

    @property
    def version(self) -> str:
        """Of what replicas are made of: replicas of another version give way to those of this one."""
        parts = self.engine.engine_options(), dict(self.rank_resources), self.revision
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]

    def resolve(self, has_gpus: bool) -> EngineConfig:
        """The engine's configuration, wherever its ranks will be placed.

        Args:
            has_gpus: the cluster has nodes with GPUs, or can get some.

        Raises:
            ConfigError: the model does not allow it.
        """
        size = self.engine.tensor_parallel_size
        num_cores = max(1, round(self.rank_resources.get("CPU", 1.0)))
        return self.engine.resolve(Machine(num_cores * size, size if has_gpus else 0))

    def to_json(self) -> str:
        return json.dumps(self.to_table())

    def to_table(self) -> dict[str, Any]:
        """As it would stand in a fleet file."""
        return {
            **self.engine.engine_options(),
            "tenant_weights": dict(self.engine.tenant_weights),
            **asdict(self.limits),
            "rank_resources": dict(self.rank_resources),
            "drain_grace_s": self.drain_grace_s,
            "revision": self.revision,
        }

    @staticmethod
    def from_json(text: str) -> Deployment:
        """Raises ConfigError, as `from_table`."""
        try:
            table = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"a deployment is not JSON: {error}") from error
        return Deployment.from_table(table)

    @staticmethod
    def from_table(table: object) -> Deployment:
        """Raises ConfigError on an option that there is not, or a value that it cannot have."""
        if not isinstance(table, Mapping) or not isinstance(table.get("model"), str):
            raise ConfigError("a deployment must be a table with `model`, a directory")
        given = dict(table)
        if "rank_resources" in given:
            given["rank_resources"] = _amounts("rank_resources", given["rank_resources"])
        engine = engine_from_table(given)
        limits = ScalingLimits(**_take(given, ScalingLimits))
        own = _take(given, Deployment)
        if given:
            name = min(given)
            known = [
                each.name for kind in (EngineOptions, ScalingLimits, Deployment) for each in fields(kind)
            ]
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"there is no option {name!r} of a model" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        return Deployment(engine, limits, **own)


def engine_from_table(table: dict[str, Any]) -> EngineOptions:
    """The engine's part of a table, taken out of it. Raises ConfigError on a value that cannot be."""
    if isinstance(table.get("kv_cache_memory"), str):
        table["kv_cache_memory"] = parse_num_bytes(table["kv_cache_memory"])
    if "tenant_weights" in table:
        table["tenant_weights"] = tuple(_amounts("tenant_weights", table["tenant_weights"]).items())
    return EngineOptions(**_take(table, EngineOptions))


def read_fleet_file(path: Path) -> tuple[Deployment, ...]:
    """Raises ConfigError on a file that cannot be used; names the model."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"fleet file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"fleet file {path}: {error}") from error
    tables = content.pop("model", None)
    if content or not isinstance(tables, list) or not tables:
        raise ConfigError(f"fleet file {path} must hold [[model]] tables and nothing else")
    deployments = []
    for number, table in enumerate(tables, start=1):
        try:
            deployments.append(Deployment.from_table(table))
        except ConfigError as error:
            raise ConfigError(f"fleet file {path}, model {number}: {error}") from error
    names = [deployment.name for deployment in deployments]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"fleet file {path} has {' and '.join(twice)} twice; give one a served_model_name")
    return tuple(deployments)


def _take(given: dict[str, Any], kind: type) -> dict[str, Any]:
    """The options that are fields of the class, taken out of those given. Raises ConfigError on a wrong type."""
    hints = get_type_hints(kind)
    taken = {}
    for each in fields(kind):
        if each.name in given:
            taken[each.name] = _checked(each.name, given.pop(each.name), hints[each.name])
    return taken


def _checked(name: str, value: Any, hint: Any) -> Any:
    kinds = getattr(hint, "__args__", (hint,)) if not hasattr(hint, "__origin__") else (hint.__origin__,)
    if type(value) is int and float in kinds:
        return float(value)
    if any(value is None if kind is type(None) else isinstance(value, kind) for kind in kinds) and not (
        isinstance(value, bool) and bool not in kinds
    ):
        return value
    words = " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds if kind is not type(None))
    raise ConfigError(f"{name} is {value!r}, must be {words}")


_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _amounts(name: str, value: object) -> dict[str, float]:
    """A table of names and numbers."""
    if isinstance(value, Mapping) and all(
        isinstance(key, str) and type(amount) in (int, float) for key, amount in value.items()
    ):
        return {key: float(amount) for key, amount in value.items()}
    raise ConfigError(f"{name} is {value!r}, must be a table of names and numbers")
