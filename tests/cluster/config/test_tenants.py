"""Tenants files."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.config.tenants import TenantOptions, load_tenants
from quire.proto.errors import ConfigError


def test_tenants_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(
        """
        [default]
        max_concurrent_requests = 8
        requests_per_minute = 60

        [tenants.gold]
        max_concurrent_requests = 64
        tokens_per_minute = 1e6
        prefix_pool = "metals"

        [tenants."tin & co"]
        """
    )
    tenants = load_tenants(file)
    assert tenants.of("nobody") == TenantOptions(8, 60.0)
    assert tenants.of("tin & co") == TenantOptions(8, 60.0)
    assert tenants.of("gold") == TenantOptions(64, 60.0, 1e6, "metals")


def test_empty_tenants_file_limits_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("")
    assert load_tenants(file).of("gold") == TenantOptions()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[default", "Expected"),
        ("[defaults]", "there is no option 'defaults' of a tenants file; did you mean 'default'"),
        ("default = 3", "default is 3, must be a table"),
        ("[tenants]\ngold = 3", "tenants.gold is 3, must be a table"),
        (
            "[tenants.gold]\nrequest_per_minute = 3",
            "'request_per_minute' of the table tenants.gold; did you mean",
        ),
        (
            "[tenants.gold]\nrequests_per_minute = 0",
            "tenants.gold: requests_per_minute is 0, must be above 0",
        ),
        ("[tenants.gold]\ntokens_per_minute = inf", "tokens_per_minute is inf, must be above 0 and finite"),
        (
            "[default]\nmax_concurrent_requests = 1.5",
            "max_concurrent_requests is 1.5, must be a whole number",
        ),
        ("[default]\nprefix_pool = 'all'", "prefix_pool must name tenants one by one"),
    ],
)
def test_invalid_tenants_file_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"tenants file .*{problem}"):
        load_tenants(file)


def test_unreadable_tenants_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_tenants(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"binary: .*decode"):
        load_tenants(tmp_path / "binary")
