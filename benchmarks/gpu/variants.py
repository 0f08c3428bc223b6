"""Stage `variants`: the 8B Llama with float8 and int8 weights, with a quantized KV cache, and with libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import MODEL, measure_decode, random_prompt, serving
from benchmarks.gpu.libraries import installed_libraries
from benchmarks.gpu.random_llama import write_llama
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import copy_rate, roof

VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
    "int8": {"quantization": "int8"},
    "int8_kv": {"kv_cache_dtype": "int8"},
}
# Load, record graphs, measure.
VARIANT_S = 20.0


def run(record: Record, folder: Path, work: Path, sizes: Sizes) -> None:
    model = work / MODEL
    write_llama(model, sizes.model, sizes.dtype, sizes.device)
    copy = roof(folder, "copy", lambda: copy_rate(sizes.copy_bytes, sizes.device, sizes.repeat_s))
    length = sizes.prefill_lens[-1]
    libraries = {each: {"attention_backend": each} for each in installed_libraries(sizes.device)}
    for name, options in (VARIANTS | libraries).items():
        if record.begins(name, VARIANT_S):
            with record.case(name), serving(record, model, sizes, name, **options) as server:
                for rows, tokens in (sizes.decodes[0], sizes.decodes[-3]):
                    case = f"decode.{rows}x{tokens}.{name}"
                    with record.case(case):
                        measure_decode(record, server, sizes, copy, case, rows, tokens)
                server.prefill([server.submit(random_prompt(sizes, 1, length), 1)])
                seconds = server.prefill([server.submit(random_prompt(sizes, 2, length), 1)])
                record.add(f"engine.prefill.{length}.{name}_ms", 1e3 * seconds, "ms")
