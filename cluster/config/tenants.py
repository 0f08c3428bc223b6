"""Tenants: limits and prefix pools of tenants, from an operator's TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...proto.errors import ConfigError
from ...proto.options.option import check_names, declared_options, option, validate_options
from ...proto.options.values import positive, positive_finite

_option = partial(option, group="Limits")
_TABLES = "default", "tenants"


@dataclass(frozen=True, slots=True)
class TenantOptions:
    """Limits and options of one tenant. A limit of None does not limit."""

    max_concurrent_requests: int | None = _option(
        None, help="Requests that run or wait at once.", unit="requests", check=positive
    )
    requests_per_minute: float | None = _option(
        None, help="Requests started in a minute.", unit="requests", check=positive_finite
    )
    tokens_per_minute: float | None = _option(
        None, help="Prompt and output tokens in a minute.", unit="tokens", check=positive_finite
    )
    prefix_pool: str | None = _option(
        None, help="Tenants with the same pool share cached prefixes; others share none."
    )

    def __post_init__(self) -> None:
        validate_options(self)


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of a server.

    Attributes:
        default: options of every tenant that has none of its own.
        by_name: tenant |-> its options; what it does not set is as in `default`.
    """

    default: TenantOptions = field(default_factory=TenantOptions)
    by_name: Mapping[str, TenantOptions] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantOptions:
        return self.by_name.get(tenant, self.default)


def load_tenants(path: Path) -> Tenants:
    """Read a tenants file.

    Raises:
        ConfigError: the file cannot be read, or an entry is not allowed; the error names the table.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"tenants file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"tenants file {path}: {error}") from error
    try:
        return _parse(tables)
    except ConfigError as error:
        raise ConfigError(f"tenants file {path}: {error}") from error


def _parse(tables: Mapping[str, Any]) -> Tenants:
    check_names(tables, "a tenants file", _TABLES)
    default = _table("default", tables.get("default", {}))
    if "prefix_pool" in default:
        raise ConfigError(
            "default: prefix_pool must name tenants one by one, so that no tenant shares by accident"
        )
    tenants = {
        name: TenantOptions(**(default | _table(f"tenants.{name}", table)))
        for name, table in _as_table("tenants", tables.get("tenants", {})).items()
    }
    return Tenants(TenantOptions(**default), tenants)


def _table(where: str, table: Any) -> dict[str, Any]:
    """Return the options in a table. Raises ConfigError if one of them is not allowed."""
    entries = _as_table(where, table)
    check_names(entries, f"the table {where}", declared_options(TenantOptions))
    try:
        TenantOptions(**entries)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return entries


def _as_table(where: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}, must be a table")
    return table
