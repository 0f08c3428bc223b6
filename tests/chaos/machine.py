"""Faults of the machine under a server: a full disk, a jump of the clock, and too little memory."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

DISK_BYTES = 256 << 20
# Address space that a process may still take while memory is short.
MEMORY_LEFT_BYTES = 8 << 20

# Python's own clock jumps, and not that of the C++ libraries: these wait until a time of the real clock.
_CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) offset_s = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    Dl_info caller;
    if (status || !offset_s || !*offset_s || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return status;
    if (!dladdr(__builtin_return_address(0), &caller) || !caller.dli_fname) return status;
    const char *name = strrchr(caller.dli_fname, '/');
    name = name ? name + 1 : caller.dli_fname;
    if (!strncmp(name, "python", 6) || !strncmp(name, "libpython", 9)) now->tv_sec += *offset_s;
    return status;
}
"""


class Clock:
    """Wall clock of the processes that are started with `environment`; the others see the real one.

    Args:
        folder: for its library and its file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._library = folder / "clock.so"
        self.jump(0)
        source = folder / "clock.c"
        source.write_text(_CLOCK_SOURCE)
        command = ["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(self._library), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)}

    def jump(self, offset_s: int) -> None:
        """Let the clock be so many seconds ahead of the real one."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("l", offset_s))


class Disk:
    """A disk of its own for temporary files, of DISK_BYTES.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / "filler"

    def fill(self) -> None:
        """Leave no space for anything else."""
        with suppress(OSError), self._file.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def free(self) -> None:
        self._file.unlink(missing_ok=True)


@contextmanager
def own_disk() -> Iterator[Disk | None]:
    """Mount a disk, on which processes that are started in the block have their temporary files.

    Yields None if this user may not mount.
    """
    with tempfile.TemporaryDirectory(prefix="qc", dir="/tmp") as folder:  # short: Unix sockets live in it
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            yield None
            return
        before = tempfile.tempdir
        tempfile.tempdir = folder
        try:
            yield Disk(Path(folder))
        finally:
            tempfile.tempdir = before
            subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


@contextmanager
def short_of_memory(pid: int) -> Iterator[None]:
    """Let a process take no more than MEMORY_LEFT_BYTES of address space."""
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    limit = psutil.Process(pid).memory_info().vms + MEMORY_LEFT_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
