"""Packages and wheels. The folders of this repository are the subpackages of `quire`; metadata is in pyproject.toml.

With a C++ compiler, a wheel brings the C++ ops for the processor that builds it, as `pip install` of a clone or an
sdist does. Without one, it is pure, and its ops are compiled on first use. These variables make another one:

    QUIRE_WHEEL_PLATFORM  the wheel's platform tag, for example manylinux_2_28_x86_64: it brings the ops for each
                          processor of the platform; `any` for a pure wheel
    QUIRE_WHEEL_CXX       the command of a C++ compiler for that platform

The version is the newest tag's, `v1.2.0`, or of the development after it: 1.2.1.dev7+g0123abc. QUIRE_VERSION sets
another.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDERS = ("proto", "kernels", "worker", "scheduler", "cluster")
MACHINES = ("x86_64", "aarch64")
COMPILER = shlex.split(
    os.environ.get("QUIRE_WHEEL_CXX")
    or os.environ.get("CXX")
    or shutil.which("c++")
    or shutil.which("g++")
    or ""
)
CHOSEN_PLATFORM = os.environ.get("QUIRE_WHEEL_PLATFORM")
THIS_PLATFORM = f"linux_{platform.machine()}"
PLATFORM = CHOSEN_PLATFORM or (
    THIS_PLATFORM if sys.platform == "linux" and COMPILER and shutil.which(COMPILER[0]) else "any"
)


# Of a checkout before the first tag, and of source without git.
FIRST_VERSION = "0.1.0"


def version() -> str:
    """Return the version of this source: QUIRE_VERSION, the one of an sdist, or the one that git describes."""
    root = Path(__file__).resolve().parent
    if given := os.environ.get("QUIRE_VERSION"):
        return given
    if (sdist := root / "PKG-INFO").exists():
        return re.findall(r"^Version: (.*)$", sdist.read_text(), re.MULTILINE)[0]
    command = ["git", "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        described = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return FIRST_VERSION
    tag, num_commits, commit = described.strip().removeprefix("v").rsplit("-", 2)
    if num_commits == "0":
        return tag
    release, patch, candidate = re.fullmatch(r"(.*\.)?(\d+)(.*)", tag).groups(
        default=""
    )  # 1.2.0, or 1.2.0rc1
    next_release = f"{release}{int(patch) + (not candidate)}"
    return f"{next_release}.dev{num_commits}+{commit}"


class QuireDistribution(Distribution):
    """Files of a platform's wheel are installed where extension modules are."""

    def has_ext_modules(self) -> bool:
        return PLATFORM != "any"


class BuildWithLibraries(build_py):
    """Copies the packages, then builds the libraries of C++ ops of a platform."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / "quire" / "kernels" / "native" / "prebuilt"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build for a platform
        if PLATFORM == "any" or self.editable_mode:
            return
        sys.path.insert(0, str(Path(__file__).parent))
        from kernels.native.instruction_sets import all_choices, instruction_set, without_tiles
        from kernels.native.prebuilt import PORTABLE_FLAGS, prebuild

        if CHOSEN_PLATFORM:
            (machine,) = (name for name in MACHINES if PLATFORM.endswith(name))
            prebuild(folder, all_choices(machine), [*COMPILER, *PORTABLE_FLAGS])
            return
        for choice in filter(None, (instruction_set(), without_tiles())):
            try:
                prebuild(folder, [choice], COMPILER)
                break
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"the C++ ops for {choice} cannot be built now: {error}", file=sys.stderr, flush=True)


class Wheel(bdist_wheel):
    """A wheel for every Python 3: the libraries are loaded with ctypes and know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM


setup(
    version=version(),
    packages=[
        "quire",
        *(f"quire.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])),
    ],
    package_dir={"quire": "."},
    distclass=QuireDistribution,
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": Wheel},
)
