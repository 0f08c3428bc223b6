"""Packages and wheels. The folders of this repository are the subpackages of `quire`; metadata is in pyproject.toml.

A wheel is pure, and its C++ ops are compiled on first use, unless these variables make it one of a platform:

    QUIRE_WHEEL_PLATFORM  the wheel's platform tag, for example manylinux_2_28_x86_64
    QUIRE_WHEEL_CXX       the command of a C++ compiler for that platform
"""

import os
import shlex
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDERS = ("proto", "kernels", "worker", "scheduler", "cluster")
PLATFORM = os.environ.get("QUIRE_WHEEL_PLATFORM")
MACHINES = ("x86_64", "aarch64")


class QuireDistribution(Distribution):
    """Files of a platform's wheel are installed where extension modules are."""

    def has_ext_modules(self) -> bool:
        return PLATFORM is not None


class BuildWithLibraries(build_py):
    """Copies the packages, then builds the libraries of C++ ops of a platform."""

    def run(self) -> None:
        super().run()
        if PLATFORM is not None and not self.editable_mode:
            sys.path.insert(0, str(Path(__file__).parent))
            from kernels.native.prebuilt import prebuild

            (machine,) = (name for name in MACHINES if PLATFORM.endswith(name))
            folder = Path(self.build_lib) / "quire" / "kernels" / "native" / "prebuilt"
            prebuild(folder, machine, shlex.split(os.environ.get("QUIRE_WHEEL_CXX", "c++")))


class Wheel(bdist_wheel):
    """A wheel for every Python 3: the libraries are loaded with ctypes and know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM or "any"


setup(
    packages=[
        "quire",
        *(f"quire.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])),
    ],
    package_dir={"quire": "."},
    distclass=QuireDistribution,
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": Wheel},
)
