"""Compiles every Triton kernel for a compute capability, without such a GPU: ``python compile_kernels.py 80``.

The wrappers run on CPU tensors with a stand-in for the GPU's driver. A launch binds and specializes its arguments and
compiles the variant as on a GPU, and ends there. Prints the version of Triton, then one line per variant: module and
kernel, bytes of shared memory, bytes of stack per thread. Fails if a kernel of kernels.gpu is launched by none of
kernel_cases, if a variant needs more shared memory than the GPU has, if one spills more registers to the stack than
`max_stack_bytes` allows, if one of WIDE_KERNELS accesses memory 2 bytes at a time, or if one of WEIGHT_KERNELS reads
weights in other ways than `find_narrow_reads` allows. ``bind`` as second argument
compiles nothing and looks for kernels without a case only; the name of a function of kernel_cases launches that only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import kernel_cases
import torch
import triton
from launched_kernels import launched_kernels
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# Bytes of stack per thread that kernels may have: calls have frames of 8, and few registers are spilled.
MAX_STACK_BYTES = {"sample_top_k_top_p._sample_from_rows": 64, "recurrence._pass_states": 320}
DEFAULT_STACK_BYTES = 16
# Of attention in 16-bit types: see kernels.gpu.tile_configs.
MAX_ATTENTION_STACK_BYTES = 40 if triton.__version__ < "3.8" else 16
MAX_BLACKWELL_STACK_BYTES = 64
# Of chunks on compute capability 8.0, compiled by Triton 3.7: three variants of models' sizes spill 12 registers.
MAX_AMPERE_STACK_BYTES = 48
# Of chunks, if the number of query heads per KV head is no power of two.
MAX_ODD_GROUP_STACK_BYTES = 88
# Of expanded latent attention to chosen tokens on compute capability 8.0; the models that have it need newer GPUs.
MAX_CHOICE_STACK_BYTES = 1200
# In float32, which multiplies on tensor cores in three parts, and is for tests.
MAX_FLOAT32_STACK_BYTES = 1024
# With heads of more than 256 numbers.
MAX_WIDE_FLOAT32_STACK_BYTES = 8192

# Kernels that read the memory of other GPUs.
WIDE_KERNELS = {"all_reduce_norm._all_reduce_add_rms_norm"}

# Kernels that convert weights in registers.
WEIGHT_KERNELS = {"quantized_linear._quantized_linear", "moe._expert_linear"}
# Of shared memory, which copies of weights and tokens fill ahead. Tiles of 16-bit weights have 60 KB and more.
MIN_AHEAD_BYTES = 28 << 10


class StandInDriver:
    """Driver of a GPU that is not there. Triton asks it for the target only, as long as nothing is launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compilations:
    """Compiles each variant that is launched, as the first launch on a GPU does, and launches none.

    Triton's own binder chooses the variant from the arguments, because versions differ in how they specialize them.

    Attributes:
        kernels: launched so far, as ``module.function``.
    """

    def __init__(self, capability: int, *, binds_only: bool) -> None:
        self.problems: list[str] = []
        self.kernels: set[str] = set()
        self._capability, self._binds_only = capability, binds_only
        self._done: set[int] = set()

    def install(self) -> None:
        driver.set_active(StandInDriver(self._capability))
        torch.cuda.get_device_capability = lambda device=None: divmod(self._capability, 10)
        if self._binds_only:
            triton.knobs.runtime.jit_cache_hook = lambda **_: True  # as if the variant were being compiled
        launch = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
            name = f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"
            self.kernels.add(name)
            if compiled is not None and id(compiled) not in self._done:
                self._done.add(id(compiled))  # Triton keeps each variant, so the id is not used again
                self._check(name, args, compiled)
            return compiled

        JITFunction.run = compile_only

    def _check(self, name: str, args: tuple[Any, ...], compiled: Any) -> None:
        shared, stack = int(compiled.metadata.shared), stack_bytes(compiled.asm["cubin"])
        print(name, shared, stack, flush=True)
        if shared > SHARED_BYTES[self._capability]:
            self.problems.append(f"{name} needs {shared} bytes of shared memory")
        overlaps = is_pipelined(name, args, int(compiled.metadata.num_stages), self._capability)
        if overlaps and not has_two_buffers(args, compiled.asm["ttgir"]):
            self.problems.append(f"{name} has one buffer for keys or values")
        if name in WIDE_KERNELS and re.search(r"\b(ld|st)\.global\S*\.b16\b", compiled.asm["ptx"]):
            self.problems.append(f"{name} accesses memory 2 bytes at a time")
        if name == "float8_groups._multiply_groups" or (
            name in WEIGHT_KERNELS and args[0].dtype.itemsize == 2 and args[4] is None
        ):
            self.problems += [
                f"{name} {each}" for each in find_narrow_reads(compiled.asm["ptx"], shared, args)
            ]
        if stack > max_stack_bytes(name, args, self._capability):
            self.problems.append(f"{name} spills {stack} bytes")


def find_narrow_reads(ptx: str, shared: int, args: tuple[Any, ...]) -> list[str]:
    """Return what a loop over weights does that it should not; see kernels.gpu.quantized_linear.

    Few tokens are bound by reading the weights: only their scales and zeros are copied in less than 16 bytes.
    """
    loop, found = find_product_loop(ptx), list[str]()
    if re.search(r"\bld\.global", loop):
        found.append("waits for loads in its loop")
    sizes = re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*\], (0x\w+),", loop)
    num_narrow = sum(int(size, 16) < 16 for size in sizes)
    if num_narrow == len(sizes) or (len(args[0]) <= 16 and num_narrow > 2):
        found.append(f"copies less than 16 bytes in {num_narrow} of {len(sizes)} copies")
    if shared < MIN_AHEAD_BYTES:
        found.append(f"copies {shared} bytes ahead, must be at least {MIN_AHEAD_BYTES}")
    return found


def find_product_loop(ptx: str) -> str:
    """Return the instructions of the last loop with products."""
    lines, labels, found = ptx.splitlines(), dict[str, int](), ""
    for index, line in enumerate(lines):
        if label := re.match(r"\s*(\$L__BB\w+):", line):
            labels[label[1]] = index
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", line)
        if target and target[1] in labels:
            body = "\n".join(lines[labels[target[1]] : index])
            found = body if re.search(r"\bw?g?mma|\btcgen05\.mma", body) else found
    assert found, "there is no loop with products"
    return found


def max_stack_bytes(name: str, args: tuple[Any, ...], capability: int) -> int:
    """Return the bytes of stack per thread that a variant may have."""
    if "._attend" not in name:
        return MAX_STACK_BYTES.get(name, DEFAULT_STACK_BYTES)
    if args[0].dtype == torch.float32:
        is_wide = name.startswith("paged_") and args[0].shape[2] > 256
        return MAX_WIDE_FLOAT32_STACK_BYTES if is_wide else MAX_FLOAT32_STACK_BYTES
    if capability == 80 and name == "latent_prefill._attend_expanded" and args[5] is not None:
        return MAX_CHOICE_STACK_BYTES
    if capability >= 100:
        return MAX_BLACKWELL_STACK_BYTES
    if name == "paged_prefill._attend_chunks":
        group = args[0].shape[1] // args[1].shape[2]
        if group & (group - 1):
            return MAX_ODD_GROUP_STACK_BYTES
        if capability == 80:
            return MAX_AMPERE_STACK_BYTES
    return MAX_ATTENTION_STACK_BYTES


def is_pipelined(name: str, args: tuple[Any, ...], num_stages: int, capability: int) -> bool:
    """Return whether copies of keys and values must overlap with products.

    Decodes on Hopper and Blackwell, and chunks where the tile has the stages for it (see kernels.gpu.tile_configs).
    Kernels of float32 and of more than 128 dimensions have no room for a second buffer.
    """
    is_chunked = name == "paged_prefill._attend_chunks" and num_stages >= 5
    if capability < 90 or not (is_chunked or name == "paged_decode._attend_items"):
        return False
    return bool(args[0].dtype != torch.float32 and args[0].shape[2] <= 128)


def has_two_buffers(args: tuple[Any, ...], ttgir: str) -> bool:
    """Return whether a kernel of a query and a cache copies keys and values to two buffers each."""
    stored = {1: "f8E4M3FN|i8", 2: "bf16|f16"}[args[1].dtype.itemsize]
    counts = re.findall(rf"local_alloc[^\n]*memdesc<(\d+)x\d+x\d+x(?:{stored})", ttgir)
    return len(counts) >= 2 and all(int(count) >= 2 for count in counts)


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of registers that a thread of a compiled kernel spills to its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


def main(capability: int, mode: str = "") -> None:
    compilations = Compilations(capability, binds_only=mode == "bind")
    compilations.install()
    print("triton", triton.__version__)
    if mode.startswith("launch_"):
        getattr(kernel_cases, mode)()
    else:
        kernel_cases.launch_everything(capability)
        for name in sorted(launched_kernels(capability) - compilations.kernels):
            compilations.problems.append(f"{name} has no case in kernel_cases")
    assert compilations.problems == [], "\n".join(compilations.problems)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
