"""Package discovery: the folders of this repository are the subpackages of `quire`. All else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("proto", "kernels", "worker", "scheduler", "cluster")

setup(
    packages=[
        "quire",
        *(f"quire.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])),
    ],
    package_dir={"quire": "."},
)
