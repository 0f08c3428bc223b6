"""The instruction sets that the C++ ops are built for, and the choice among them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "QUIRE_CPU_ISA"


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of instructions, one library each.

    Attributes:
        machines: values of platform.machine(); empty for any.
        features: that the processor needs, as Linux names them.
        flags: of the compiler.
        extensions: further flags for processors with a further feature: feature |-> flag.
    """

    name: str
    machines: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()
    extensions: tuple[tuple[str, str], ...] = ()


_X86 = frozenset({"x86_64", "amd64", "AMD64"})
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
_AMX_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")

# The fastest first.
ALL_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("amx", _X86, _AMX, _AMX_FLAGS),
    InstructionSet("avx512", _X86, _AVX512, _AVX512_FLAGS, (("avx512_bf16", "-mavx512bf16"),)),
    InstructionSet("avx2", _X86, _AVX2, _AVX2_FLAGS),
    InstructionSet("neon", frozenset({"aarch64", "arm64"})),
    InstructionSet("baseline"),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """An instruction set that this processor has.

    Attributes:
        extensions: of the set, those that this processor has.
        flags: of the compiler, with those of the extensions.
    """

    name: str
    extensions: tuple[str, ...]
    flags: tuple[str, ...]

    def __str__(self) -> str:
        return "+".join((self.name, *self.extensions))


def choose(requested: str | None, machine: str, features: Set[str]) -> Choice:
    """Return the requested instruction set, by default the fastest one that the processor has.

    Args:
        machine: as platform.machine() names it.
        features: of the processor, as Linux names them.

    Raises:
        ValueError: there is no such set, or the processor lacks it.
    """
    supported = _supported(machine, features)
    if requested is None:
        return supported[0]
    for choice in supported:
        if choice.name == requested:
            return choice
    if requested in [instruction_set.name for instruction_set in ALL_SETS]:
        names = ", ".join(choice.name for choice in supported)
        raise ValueError(f"{VARIABLE} is {requested!r}, which this processor lacks; it has {names}")
    names = ", ".join(instruction_set.name for instruction_set in ALL_SETS)
    raise ValueError(f"{VARIABLE} is {requested!r}, must be one of {names}")


def all_choices(machine: str) -> list[Choice]:
    """Return every choice that a processor of the machine can lead to.

    Args:
        machine: as platform.machine() names it.
    """
    found: dict[str, Choice] = {}
    for instruction_set in ALL_SETS:
        extensions = [feature for feature, _ in instruction_set.extensions]
        for count in range(len(extensions) + 1):
            for chosen in itertools.combinations(extensions, count):
                for choice in _supported(machine, instruction_set.features | set(chosen)):
                    found.setdefault(str(choice), choice)
    return list(found.values())


def supported_sets() -> list[str]:
    """Return the names of the instruction sets that this processor has, the fastest first."""
    return [choice.name for choice in _supported(platform.machine(), processor_features())]


def instruction_set() -> Choice:
    """Return the instruction set for this process: the variable QUIRE_CPU_ISA, else the processor, decides.

    Raises:
        ValueError: see choose.
    """
    return choose(os.environ.get(VARIABLE) or None, platform.machine(), processor_features())


def without_tiles() -> Choice | None:
    """Return the set for a compiler that does not know the tile registers which `instruction_set` has; None if none.

    GCC knows them from version 11 on, Clang from 12.
    """
    features = processor_features()
    if os.environ.get(VARIABLE) or instruction_set().name != "amx":
        return None
    return choose(None, platform.machine(), features - {"amx_tile"})


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the features that Linux reports; none on other systems, which get the sets that need none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    features = parse_features(text)
    return features if "amx_tile" not in features or _may_use_tiles() else features - {"amx_tile"}


def _may_use_tiles() -> bool:
    """Ask Linux for tile registers, without which their first instruction ends a process. Forked children keep them.

    Linux refuses before version 5.16, in some sandboxes, and if a thread's stack for signals is too small for them.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def parse_features(text: str) -> frozenset[str]:
    """Return the features of the first processor in the text of /proc/cpuinfo."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _supported(machine: str, features: Set[str]) -> list[Choice]:
    return [
        _with_extensions(instruction_set, features)
        for instruction_set in ALL_SETS
        if (not instruction_set.machines or machine in instruction_set.machines)
        and instruction_set.features <= features
    ]


def _with_extensions(instruction_set: InstructionSet, features: Set[str]) -> Choice:
    found = [(feature, flag) for feature, flag in instruction_set.extensions if feature in features]
    extensions, flags = tuple(feature for feature, _ in found), tuple(flag for _, flag in found)
    return Choice(instruction_set.name, extensions, instruction_set.flags + flags)
