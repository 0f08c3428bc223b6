"""Stage `adapters`: decodes of the 8B Llama without adapters, with one on all rows, and with several in a step.

Steps are replayed from graphs; those of several adapters are launched kernel by kernel, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.engine import MODEL, measure_rows, random_prompt, serving
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.random_parts import write_adapter
from benchmarks.gpu.record import Record
from benchmarks.gpu.server import Server
from benchmarks.gpu.sizes import Sizes
from quire.proto.lora import LoraReference

Adapters = Sequence[LoraReference | None]


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model = work / MODEL
    write_llama(model, sizes.model, sizes.dtype, sizes.device)
    with tempfile.TemporaryDirectory(dir=work) as made:
        adapters = []
        for index in range(sizes.num_adapters):
            write_adapter(Path(made) / f"adapter-{index}", sizes)
            adapters.append(LoraReference(f"adapter-{index}", str(Path(made) / f"adapter-{index}")))
        options = {
            "max_loras": len(adapters),
            "max_cpu_loras": len(adapters),
            "max_lora_rank": sizes.adapter_rank,
        }
        ways: dict[str, Adapters] = {"none": [None], "one": adapters[:1], "several": adapters}
        with serving(record, model, sizes, "adapters", enable_lora=True, **options) as server:
            for way, used in ways.items():
                if record.begins(way, 10):
                    with record.case(way):
                        measure_way(record, server, sizes, way, used)
        if record.begins("eager", 20):
            eager = serving(
                record, model, sizes, "adapters_eager", enable_lora=True, cuda_graphs=False, **options
            )
            with record.case("eager"), eager as server:
                measure_way(record, server, sizes, "eager", adapters)


def measure_way(record: Record, server: Server, sizes: Sizes, way: str, adapters: Adapters) -> None:
    """Measure decodes whose rows take turns with the adapters."""
    rows, length = sizes.decodes[-3]
    handles = [
        server.submit(random_prompt(sizes, index, length // 2), length, lora=adapters[index % len(adapters)])
        for index in range(rows)
    ]
    step_s = measure_rows(server, handles, sizes.num_timed)
    server.abort()
    record.add(f"adapters.{way}.{rows}x{length}.step_ms", 1e3 * step_s, "ms", f"rank {sizes.adapter_rank}")
    record.add(f"adapters.{way}.{rows}x{length}.tokens_per_s", rows / step_s, "tokens/s")
