"""Count of the kernel variants that this process has compiled or loaded from Triton's cache on disk.

Triton does so at the first launch with arguments of a new kind, which stalls the step: 1.5 to 4 s for attention, and
10 to 50 ms if the cache on disk has the variant. An engine launches every variant before it is ready.
"""

import functools
from typing import Any

import triton

_num_compilations = 0
_is_compiling = False


def num_compilations() -> int:
    """Return the number of variants so far."""
    return _num_compilations


def is_compiling() -> bool:
    """Return whether a variant is being compiled or loaded, or failed to; any thread may call it.

    The compiler releases Python's lock: other threads of the process waited at most 0.4 s on a busy machine.
    """
    return _is_compiling


def forget_failure() -> None:
    """Forget a compilation that raised an exception, which Triton reports to no hook."""
    global _is_compiling
    _is_compiling = False


@functools.cache
def count_compilations() -> None:
    """Count from now on. Safe to call twice."""
    knobs = triton.knobs.runtime
    before, after = knobs.jit_cache_hook, knobs.jit_post_compile_hook

    def begin(*args: Any, **kwargs: Any) -> Any:
        global _is_compiling
        is_skipped = None if before is None else before(*args, **kwargs)
        _is_compiling = not is_skipped
        return is_skipped

    def end(*args: Any, **kwargs: Any) -> Any:
        global _num_compilations, _is_compiling
        _num_compilations += 1
        _is_compiling = False
        return None if after is None else after(*args, **kwargs)

    knobs.jit_cache_hook, knobs.jit_post_compile_hook = begin, end
