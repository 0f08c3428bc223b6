"""Licenses of all that `pip install quire` installs, the lock of their versions, and the versions that are tested."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Licenses that software under Apache-2.0 may depend on. MPL-2.0 covers changes of its own files only.
ALLOWED = re.compile(
    r"\b(Apache|MIT|BSD|ISC|PSF|Python-2|Python Software Foundation|CNRI-Python|MPL-2\.0|Mozilla Public License 2\.0|"
    r"Unlicense|0BSD|Zlib|BSL-1\.0|HPND|CC0)",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"\b(A?GPL|GNU (Affero )?General|SSPL|BUSL|Commons Clause|proprietary)", re.IGNORECASE)
# NVIDIA's libraries, which GPU builds of torch bring under NVIDIA's own terms.
CUDA = re.compile(r"nvidia-|cuda-")


def required(text: str) -> Requirement | None:
    """Return a requirement if this environment needs it."""
    requirement = Requirement(text)
    return requirement if requirement.marker is None or requirement.marker.evaluate({"extra": ""}) else None


def installed(names: list[str]) -> Iterator[Distribution]:
    """Yield the distributions that the requirements need, with what these need."""
    waiting, seen = [Requirement(name).name for name in names], set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield found
        needed = map(required, found.requires or [])
        waiting += [requirement.name for requirement in needed if requirement is not None]


def license_of(found: Distribution) -> str:
    """Return the license as the metadata has it: an expression, classifiers, or the first line of a text."""
    metadata = found.metadata
    classifiers = [
        each.rpartition(" :: ")[2] for each in metadata.get_all("Classifier", []) if "License ::" in each
    ]
    given = metadata["License-Expression"] or ", ".join(classifiers) or metadata["License"] or ""
    return given.strip().splitlines()[0] if given.strip() else ""


RUNTIME = {each.metadata["Name"]: each for each in installed(PROJECT["dependencies"])}


@pytest.mark.parametrize("name", sorted(RUNTIME))
def test_license_of_dependency_is_compatible(name: str) -> None:
    if CUDA.match(name):
        return
    text = license_of(RUNTIME[name])
    assert ALLOWED.search(text), f"{name} has the license {text!r}, which is not one of the allowed ones"
    alternatives = re.split(r"\bOR\b|, ", text)
    assert any(ALLOWED.search(each) and not FORBIDDEN.search(each) for each in alternatives), text


def test_wheel_has_license_and_notice() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE", "NOTICE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "NOTICE").read_text().startswith("quire\nCopyright")


# name |-> version and number of hashes of each distribution in the lock
LOCKED = {
    name: (version, hashes.count("--hash=sha256:"))
    for name, version, hashes in re.findall(
        r"^([\w.-]+)==(\S+)(.*?)(?=^\S|\Z)",
        (ROOT / "requirements.lock").read_text(),
        re.MULTILINE | re.DOTALL,
    )
}


def declared() -> list[Requirement]:
    """Return all requirements of pyproject.toml, those of the extras included."""
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    return [
        Requirement(each) for each in [*PROJECT["dependencies"], *extras] if not each.startswith("quire[")
    ]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_lock_satisfies_requirement(requirement: Requirement) -> None:
    assert canonicalize_name(requirement.name) in LOCKED, f"{requirement} is not locked: run `make lock`"
    version, _ = LOCKED[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version), (
        f"{requirement} excludes the locked {version}: run `make lock`"
    )


def test_lock_has_hashes_and_the_versions_of_the_constraints() -> None:
    assert [name for name, (_, num_hashes) in LOCKED.items() if num_hashes == 0] == []
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {name: LOCKED[canonicalize_name(name)][0] for name, _ in pinned} == dict(pinned)


def make_variable(name: str) -> list[str]:
    """Return the words of a variable of the Makefile."""
    found = re.search(rf"^{name} \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


def test_supported_pythons_are_those_of_ci_and_of_check_install() -> None:
    supported = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert supported == [f"3.{minor}" for minor in range(8, 30) if f"3.{minor}.0" in allowed]
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    assert make_variable("PYTHONS") == [f"python{version}" for version in supported]


def test_pinned_triton_is_one_of_those_that_are_tested() -> None:
    tested = make_variable("TRITON_VERSIONS")
    assert LOCKED["triton"][0] in tested
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["triton"])
    assert all(version in requirement.specifier for version in tested)
