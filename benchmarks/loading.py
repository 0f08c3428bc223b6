"""Load time and peak memory per GB of stored weights, for each format of weights, on a CPU.

    python -m benchmarks.loading --json benchmarks/results/loading.json

Each load is in a process of its own. transformers loads the formats that need no library besides it. Before them, the
parts of one rank of 2 and of 8 are read from matrices in the page cache, beside reads of the whole file by as many
threads. The rate of a column slice counts its own bytes, of which a run of some hundred lies in each row; beside it
stands that of the part of the file that these runs span, which is what a disk would have to deliver.

    python -m benchmarks.loading --nodes 2 4 --json benchmarks/results/loading_nodes.json

measures instead how long nodes take to fill their copies of files from one source of a limited rate, and how much
they read from it: each for itself, as nodes of one replica, and as replicas that start together. A process stands for
a node; the source's rate is a limit on the reads of all processes together.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Figure, make_parser, median, names_from, report
from benchmarks.families import UNITS, measure_load
from benchmarks.quantized_checkpoints import Scheme, write_checkpoint
from benchmarks.random_models import make_model

if TYPE_CHECKING:
    from torch import Tensor

    from quire.worker.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Format:
    """Format of stored weights.

    Attributes:
        scheme: of the quantized checkpoint; None for one in full precision.
        dtype: of the model; a checkpoint in full precision is stored in it.
        quantization: applied by quire while the weights are read.
    """

    scheme: Scheme | None = None
    dtype: str = "float32"
    quantization: str | None = None

    @property
    def engines(self) -> tuple[str, ...]:
        is_plain = self.scheme is None and self.quantization is None
        return ("quire", "transformers") if is_plain else ("quire",)


FORMATS = {
    "float32": Format(),
    "bfloat16": Format(dtype="bfloat16"),
    "bfloat16_quantized_to_int8": Format(dtype="bfloat16", quantization="int8"),
    "int8": Format(Scheme("codes", bits=8, group_len=None, symmetric=True)),
    "float8_blocks": Format(Scheme("float8", is_float=True, block=(128, 128))),
    "awq": Format(Scheme("awq", group_len=128)),
    "gptq": Format(Scheme("gptq", group_len=128)),
    "nvfp4": Format(Scheme("nvfp4", group_len=16, is_float=True)),
}


def write_format(source: Path, folder: Path, chosen: Format) -> Path:
    """Write a model in float32 in a format. Returns its directory."""
    if chosen.scheme is not None:
        write_checkpoint(source, folder, chosen.scheme)
        return folder
    if chosen.dtype == "float32":
        return source
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = getattr(torch, chosen.dtype)
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def load(engine: str, chosen: Format, folder: Path) -> object:
    if engine == "quire":
        from quire import LLM

        options: dict[str, Any] = {"num_kv_blocks": 16, "max_model_len": 256, "max_num_batched_tokens": 256}
        return LLM(str(folder), device="cpu", dtype=chosen.dtype, quantization=chosen.quantization, **options)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=chosen.dtype).eval()


def load_apart(engine: str, name: str, folder: Path) -> dict[str, float]:
    """Load a model in a process of its own. Returns figure |-> value."""
    command = [sys.executable, "-m", "benchmarks.loading", "--load", engine, name, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


# name |-> [N, K] and dtype of the matrices: down projections of Llama 8B, and of DeepSeek V3's experts.
MATRICES = {"bfloat16_k14336": (4096, 14336, "bfloat16"), "float8_k2048": (7168, 2048, "float8_e4m3fn")}
SLICED_BYTES = 256 << 20


def measure_slices(folder: Path, repeats: int) -> dict[str, Figure]:
    """Measure reads of row and column slices of matrices in a file in the page cache, in the best of `repeats`."""
    import torch
    from safetensors.torch import save_file

    from quire.worker.weights.checkpoint import MAX_READERS, Checkpoint

    figures: dict[str, Figure] = {}
    for kind, (num_outputs, num_inputs, dtype_name) in MATRICES.items():
        dtype = getattr(torch, dtype_name)
        count = max(1, SLICED_BYTES // (num_outputs * num_inputs * dtype.itemsize))
        names = [f"layers.{index}.weight" for index in range(count)]
        matrix = torch.randint(0, 120, (num_outputs, num_inputs * dtype.itemsize), dtype=torch.uint8)
        save_file({name: matrix.view(dtype).clone() for name in names}, folder / "model.safetensors")
        shape = num_outputs, num_inputs
        with closing(Checkpoint(folder)) as checkpoint:
            rate = best_rate(lambda: read_whole(folder / "model.safetensors", MAX_READERS), repeats)
            figures[f"loading.slices.{kind}.page_cache"] = Figure(rate, "GB/s", f"{MAX_READERS} threads")
            for num_ranks, dim in itertools.product((2, 8), (0, 1)):
                own = [length // num_ranks if axis == dim else length for axis, length in enumerate(shape)]
                out = torch.zeros(own, dtype=dtype)

                read = functools.partial(read_slices, checkpoint, names, shape, dim, out)
                name = f"loading.slices.{kind}.{('rows', 'columns')[dim]}_of_{num_ranks}"
                rate = best_rate(read, repeats)
                figures[name] = Figure(rate, "GB/s")
                if dim == 1:
                    figures[f"{name}.spanned"] = Figure(rate * num_ranks, "GB/s", "of the file")
    return figures


def read_slices(
    checkpoint: Checkpoint, names: list[str], shape: tuple[int, int], dim: int, out: Tensor
) -> int:
    """Read the second rank's slice of each matrix; return their bytes."""
    for name in names:
        checkpoint.read_into(out, name, shape, dim, out.shape[dim])
    return len(names) * out.nbytes


def read_whole(path: Path, num_threads: int) -> int:
    """Read a file by several threads; return its bytes."""
    part_bytes, num_bytes = 8 << 20, path.stat().st_size
    buffers = threading.local()

    def read(start: int) -> None:
        if not hasattr(buffers, "part"):
            buffers.part = bytearray(part_bytes)
        os.preadv(descriptor, [buffers.part], start)

    with ThreadPoolExecutor(num_threads) as threads, path.open("rb") as file:
        descriptor = file.fileno()
        list(threads.map(read, range(0, num_bytes, part_bytes)))
    return num_bytes


# Ways to fill the copies of nodes |-> what a node knows of the others: all of a replica, or those before it.
NODE_WAYS = "alone", "one_replica", "replicas"
NODE_FILES, NODE_FILE_BYTES = 4, 64 << 20


def measure_nodes(count: int, way: str, source_mb_per_s: float, repeats: int) -> dict[str, Figure]:
    """Return the median seconds until each of some nodes has its copy, and the bytes read from the source."""
    seconds, read_gb = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            (source := folder / "source").mkdir()
            for file in range(NODE_FILES):
                (source / f"{file}.safetensors").write_bytes(os.urandom(NODE_FILE_BYTES))
            (folder / "meter").write_text("0 0")
            settings = [str(folder), str(source_mb_per_s), str(count)]
            command = [sys.executable, "-m", "benchmarks.loading", "--node", *settings]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            nodes = [
                stack.enter_context(subprocess.Popen([*command, str(own)], **pipes)) for own in range(count)
            ]
            for process in nodes:
                stack.callback(process.kill)
            reports = [process.stdout for process in nodes if process.stdout is not None]
            sources = [lines.readline().strip() for lines in reports]
            started = time.monotonic()
            for process in nodes:
                print(way, *sources, file=process.stdin, flush=True)
            assert [lines.readline() for lines in reports] == ["copied\n"] * count
            seconds.append(time.monotonic() - started)
            read_gb.append(float((folder / "meter").read_text().split()[1]) / 1e9)
    note = f"{NODE_FILES * NODE_FILE_BYTES / 1e9:.2f} GB at {source_mb_per_s:g} MB/s"
    name = f"loading.nodes.{count}.{way}"
    return {
        f"{name}.s": Figure(median(seconds), "s", note),
        f"{name}.source_gb": Figure(median(read_gb), "GB", note),
    }


def run_node(folder: Path, source_mb_per_s: float, num_nodes: int, own: int) -> None:
    """Fill the copy of a node, and serve it until this process is killed, or the one that started it has ended."""
    from quire.worker.rank.weight_peers import PieceStream, WeightServer
    from quire.worker.weights import node_cache
    from quire.worker.weights.weight_source import NodePeers

    source, cache = folder / "source", folder / f"node-{own}"
    os.environ[node_cache.FOLDER_VARIABLE] = str(cache)
    node_cache._device_of = lambda path: 1 if path == cache else 2
    limit_reads(source, folder / "meter", source_mb_per_s * 1e6)
    server = WeightServer(f"node {own}", lambda: True)
    print(base64.b64encode(pickle.dumps(server.copies("127.0.0.1", "", num_nodes))).decode(), flush=True)
    way, *lines = sys.stdin.readline().split()
    found = tuple(pickle.loads(base64.b64decode(line))[own] for line in lines)  # noqa: S301
    peers = {
        "alone": NodePeers(),
        "one_replica": NodePeers(found, own),
        "replicas": NodePeers(earlier=found[:own][::-1]),
    }
    assert node_cache.weights_folder(str(source), peers[way], PieceStream) != source, "it was not copied"
    print("copied", flush=True)
    sys.stdin.read()  # until it is killed, or its starter has ended


def limit_reads(folder: Path, meter: Path, bytes_per_s: float) -> None:
    """Delay reads of a folder's files, so that all processes with this meter together read at a rate; count them.

    The meter has the time at which the source is free again, and the bytes that were read.
    """
    read = os.preadv

    def read_slowly(fd: int, buffers: list[Any], offset: int) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).parent != folder:
            return read(fd, buffers, offset)
        count = read(fd, buffers, offset)
        with meter.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free_at, num_bytes = map(float, file.read().split())
            free_at = max(free_at, time.monotonic()) + count / bytes_per_s
            file.seek(0)
            file.write(f"{free_at} {num_bytes + count}")
            file.truncate()
        time.sleep(max(0.0, free_at - time.monotonic()))
        return count

    os.preadv = read_slowly  # type: ignore[assignment]


def best_rate(read: Callable[[], int], repeats: int) -> float:
    """Return the highest rate of reads, in GB/s, after one that warms up."""
    read()
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        num_bytes = read()
        rates.append(num_bytes / 1e9 / (time.perf_counter() - started))
    return max(rates)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--formats", type=names_from(FORMATS), default=list(FORMATS), metavar="A,B,...")
    parser.add_argument(
        "--model", choices=("s", "m"), default="m", help="shape: m is Qwen2.5-0.5B's, s has 60M parameters"
    )
    parser.add_argument("--repeats", type=int, default=3, help="loads of each, whose median counts")
    parser.add_argument("--load", nargs=3, metavar=("ENGINE", "FORMAT", "DIR"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--nodes", type=int, nargs="+", metavar="N", help="measure copies of so many nodes instead"
    )
    parser.add_argument("--source-mb-per-s", type=float, default=100.0, help="rate of their source")
    parser.add_argument("--node", nargs=4, metavar=("DIR", "RATE", "N", "OWN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.node is not None:
        folder, rate, num_nodes, own = arguments.node
        run_node(Path(folder), float(rate), int(num_nodes), int(own))
        return
    if arguments.nodes:
        figures: dict[str, Figure] = {}
        for count, way in itertools.product(arguments.nodes, NODE_WAYS):
            figures |= measure_nodes(count, way, arguments.source_mb_per_s, arguments.repeats)
        report(figures, arguments.json)
        return
    if arguments.load is not None:
        engine, name, path = arguments.load
        print(json.dumps(measure_load(lambda folder: load(engine, FORMATS[name], folder), Path(path))))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_slices(Path(folder), arguments.repeats)
    with tempfile.TemporaryDirectory() as source:
        make_model(Path(source), arguments.model)
        for name in arguments.formats:
            with tempfile.TemporaryDirectory() as folder:
                path = write_format(Path(source), Path(folder), FORMATS[name])
                stored = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e9
                figures[f"loading.{name}.stored_gb"] = Figure(stored, "GB")
                for engine in FORMATS[name].engines:
                    loads = [load_apart(engine, name, path) for _ in range(arguments.repeats)]
                    for key in loads[0]:
                        value = median([measured[key] for measured in loads])
                        figures[f"loading.{name}.{engine}.{key}"] = Figure(value, UNITS[key])
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
