"""Deployment: a model with its options and its number of replicas in a fleet, and the fleet files that hold several.

A fleet file is TOML with one ``[[model]]`` table per model. The entries are the options of `quire serve`, with
underscores::

    [[model]]
    model = "/models/qwen3-8b"
    served_model_name = "qwen3"
    tensor_parallel_size = 2
    min_replicas = 1
    max_replicas = 4
    target_wait_s = 2.0
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from ...proto.errors import ConfigError
from ...proto.options.option import (
    check_names,
    declared_options,
    option,
    select_options,
    validate_options,
    write_table,
)
from ...proto.options.values import (
    amounts,
    at_least,
    between,
    not_negative_finite,
    one_of,
    positive,
    positive_amounts,
    positive_finite,
    share,
)
from .engine_options import EngineOptions

MAX_DRAIN_GRACE_S = 3600.0
# Options that a part of a deployment does not have.
_ROLE_COUNTS = "prefill_replicas", "decode_replicas"
_ROLE_LIMITS = (
    "max_prefill_replicas", "max_decode_replicas", "prefill_tensor_parallel_size", "decode_tensor_parallel_size",
)  # fmt: skip
_option = partial(option, group="Fleet")


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """The bounds of the replica count, and when the autoscaler changes it. Raises ConfigError on a bad value."""

    min_replicas: int = _option(
        1,
        help="Fewest replicas; with 0 a model without requests has none.",
        unit="replicas",
        check=at_least(0),
    )
    max_replicas: int = _option(1, help="Most replicas.", unit="replicas", check=at_least(1))
    target_wait_s: float = _option(
        10.0,
        help="Longest acceptable wait of a request before its prompt is computed.",
        unit="seconds",
        check=positive_finite,
    )
    target_use: float = _option(
        0.9,
        help="Share of a replica's throughput to plan with; the rest absorbs bursts.",
        unit="share",
        check=share,
    )
    target_memory_use: float = _option(
        0.9, help="Share of a replica's KV blocks and rows to plan with.", unit="share", check=share
    )
    up_delay_s: float = _option(
        2.0,
        help="Add replicas after more were needed for this long.",
        unit="seconds",
        check=not_negative_finite,
    )
    down_delay_s: float = _option(
        3600.0,
        help="Remove replicas after fewer were enough for this long: bursts within it come without a wait.",
        unit="seconds",
        check=not_negative_finite,
    )
    max_step_up: int = _option(
        8, help="Replicas that one decision may add.", unit="replicas", check=at_least(1)
    )
    max_step_down: int = _option(
        1, help="Replicas that one decision may remove.", unit="replicas", check=at_least(1)
    )
    cooldown_s: float = _option(
        15.0, help="Time between a change and the next removal.", unit="seconds", check=not_negative_finite
    )
    idle_timeout_s: float = _option(
        900.0,
        help="Remove the last replica after this long without a request, if --min-replicas is 0.",
        unit="seconds",
        check=positive_finite,
    )
    cold_start_s: float = _option(
        60.0,
        help="Assumed start time of a replica until one has been measured.",
        unit="seconds",
        check=not_negative_finite,
    )

    def __post_init__(self) -> None:
        validate_options(self)
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, must be at least min_replicas ({self.min_replicas})"
            )

    def clamp(self, num_replicas: int) -> int:
        return min(max(num_replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model as an operator wants it served. Raises ConfigError on a value out of its range."""

    engine: EngineOptions
    limits: ScalingLimits = field(default_factory=ScalingLimits)

    rank_resources: tuple[tuple[str, float], ...] = _option(
        (),
        help="Ray resource of each rank beside its GPU; CPU=4 also gives a rank four threads. May be repeated.",
        check=positive_amounts,
        kind=amounts("rank resource", "GPU=1"),
        flag="--rank-resource",
        metavar="NAME=AMOUNT",
    )
    drain_grace_s: float = _option(
        30.0,
        help="Time that running requests may stay at a replica that drains, before they move to another.",
        unit="seconds",
        check=between(0, MAX_DRAIN_GRACE_S),
    )
    spot: str = _option(
        "any",
        help="Nodes for replicas, by the label quire.io/spot: any; prefer, spot machines and after 3 minutes without "
        "one others; only; never.",
        check=one_of("any", "prefer", "only", "never"),
    )
    weights_version: str = _option(
        "", help="Any text. A new one makes a new version, for weights that changed under the same path."
    )
    prefill_replicas: int = _option(
        0,
        help="Fewest replicas that compute long prompts for those of --decode-replicas. Either number divides the "
        "replicas into two roles, with at least one of each, and takes the place of --min-replicas.",
        unit="replicas",
        check=at_least(0),
    )
    decode_replicas: int = _option(
        0,
        help="Fewest replicas that compute everything else, with --prefill-replicas.",
        unit="replicas",
        check=at_least(0),
    )
    max_prefill_replicas: int | None = _option(
        None, help="Most of them. Default: --prefill-replicas.", unit="replicas", check=at_least(1)
    )
    max_decode_replicas: int | None = _option(
        None, help="Most of them. Default: --decode-replicas.", unit="replicas", check=at_least(1)
    )
    prefill_tensor_parallel_size: int | None = _option(
        None, help="Ranks of each of them. Default: --tensor-parallel-size.", unit="ranks", check=positive
    )
    decode_tensor_parallel_size: int | None = _option(
        None, help="Ranks of each of them. Default: --tensor-parallel-size.", unit="ranks", check=positive
    )

    def __post_init__(self) -> None:
        validate_options(self)
        if self.has_roles and self.engine.role != "both":
            raise ConfigError(
                f"role is {self.engine.role}, must be both with prefill_replicas and decode_replicas, which give "
                "each replica its own"
            )
        for part in ("prefill", "decode"):
            least, most = getattr(self, f"{part}_replicas"), getattr(self, f"max_{part}_replicas")
            if most is not None and most < least:
                raise ConfigError(
                    f"max_{part}_replicas is {most}, must be at least {part}_replicas ({least})"
                )

    @property
    def name(self) -> str:
        """The name that clients use for the model."""
        return self.engine.name

    @property
    def has_roles(self) -> bool:
        """Return whether some replicas compute prompts for others."""
        return bool(self.prefill_replicas or self.decode_replicas)

    @property
    def parts(self) -> tuple[Self, ...]:
        """Return a deployment for each role of replicas, with their limits; itself without roles."""
        if not self.has_roles:
            return (self,)
        return (
            self._part(
                "prefill",
                self.prefill_replicas,
                self.max_prefill_replicas,
                self.prefill_tensor_parallel_size,
            ),
            self._part(
                "decode", self.decode_replicas, self.max_decode_replicas, self.decode_tensor_parallel_size
            ),
        )

    def _part(self, role: str, fewest: int, most: int | None, num_ranks: int | None) -> Self:
        none: dict[str, Any] = dict.fromkeys(_ROLE_COUNTS, 0) | dict.fromkeys(_ROLE_LIMITS)
        engine = replace(
            self.engine, role=role, tensor_parallel_size=num_ranks or self.engine.tensor_parallel_size
        )
        fewest = max(1, fewest)
        limits = replace(self.limits, min_replicas=fewest, max_replicas=fewest if most is None else most)
        return replace(self, engine=engine, limits=limits, **none)

    @property
    def min_replicas(self) -> int:
        """Return the fewest replicas of all roles."""
        return sum(part.limits.min_replicas for part in self.parts)

    @property
    def max_replicas(self) -> int:
        """Return the most replicas of all roles."""
        return sum(part.limits.max_replicas for part in self.parts)

    @property
    def version(self) -> str:
        """A hash of everything that replicas are started with: a replica of another version is replaced."""
        parts = write_table(self.engine), dict(self.rank_resources), self.weights_version
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]

    def to_json(self) -> str:
        return json.dumps(self.to_table())

    def to_table(self) -> dict[str, Any]:
        """Return the deployment as a table of a fleet file."""
        options = write_table(self.engine) | write_table(self.limits) | write_table(self)
        return {"model": self.engine.model, **options}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ConfigError, as `from_table` does."""
        try:
            table = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"a deployment is not JSON: {error}") from error
        return cls.from_table(table)

    @classmethod
    def from_table(cls, table: object) -> Self:
        """Raises ConfigError on an unknown option, or a value that the option cannot have."""
        if not isinstance(table, Mapping) or not isinstance(table.get("model"), str):
            raise ConfigError("a deployment must be a table with `model`, a directory or ORG/NAME")
        owners = EngineOptions, ScalingLimits, cls
        check_names(
            table, "a model", ["model", *(name for owner in owners for name in declared_options(owner))]
        )
        engine = EngineOptions(table["model"], **select_options(EngineOptions, table))
        limits = ScalingLimits(**select_options(ScalingLimits, table))
        return cls(engine, limits, **select_options(cls, table))


def read_fleet_file(path: Path, defaults: Mapping[str, Any] | None = None) -> tuple[Deployment, ...]:
    """Return the deployments of a fleet file.

    Args:
        defaults: options of models that leave them out, by name.

    Raises:
        ConfigError: the file cannot be read, or a model in it, which the message names, has a bad option.
    """
    deployments = []
    for number, table in enumerate(_read_model_tables(path), start=1):
        try:
            deployments.append(Deployment.from_table({**(defaults or {}), **table}))
        except ConfigError as error:
            raise ConfigError(f"fleet file {path}, model {number}: {error}") from error
    names = [deployment.name for deployment in deployments]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"fleet file {path} has {' and '.join(repeated)} twice; give one a served_model_name"
        )
    return tuple(deployments)


def _read_model_tables(path: Path) -> list[dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"fleet file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"fleet file {path}: {error}") from error
    tables = content.pop("model", None)
    if content or not isinstance(tables, list) or not tables:
        raise ConfigError(f"fleet file {path} must hold [[model]] tables and nothing else")
    if not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"fleet file {path} must hold [[model]] tables, not values")
    return tables


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Facts about the Ray cluster that its fleet controller cannot find out. Raises ConfigError on a bad value."""

    autoscaling_config: Path | None = _option(
        None,
        help="Configuration file of the cluster's autoscaler. Needed unless `ray up` started the cluster.",
        metavar="FILE",
    )
    spot_notices: str | None = _option(
        None,
        help="Cloud whose notices of spot interruption the nodes watch for, to drain in time.",
        check=one_of("aws", "gcp", "azure"),
    )

    def __post_init__(self) -> None:
        validate_options(self)
