"""Generator of the gRPC code beside the .proto files: `make proto`; --check only compares and exits with 1.

The generated modules import each other as `quire.proto.*`: protoc is given the folder under that name.
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parent
SOURCES = ("inference.proto", "admin.proto")
SUFFIXES = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(into: Path) -> dict[str, bytes]:
    """Generate into a folder; return file name |-> content of every generated module."""
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-Iquire/proto={FOLDER}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    arguments += [f"quire/proto/{source}" for source in SOURCES]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    files = (path for suffix in SUFFIXES for path in (into / "quire" / "proto").glob(suffix))
    return {path.name: path.read_bytes() for path in files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where files differ")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generated = generate(Path(scratch))
    present = {path.name: path.read_bytes() for suffix in SUFFIXES for path in FOLDER.glob(suffix)}
    if check:
        stale = sorted(name for name in generated | present if generated.get(name) != present.get(name))
        if stale:
            print(
                f"generated gRPC code is not current: {', '.join(stale)}; run `make proto`", file=sys.stderr
            )
        return 1 if stale else 0
    for name, content in generated.items():
        (FOLDER / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
