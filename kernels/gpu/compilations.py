"""Count of the kernel variants that this process has compiled or loaded from Triton's cache on disk.

Triton does so at the first launch with arguments of a new kind, which stalls the step: 1.5 to 4 s for attention, and
10 to 50 ms if the cache on disk has the variant. An engine launches every variant before it is ready.
"""

import functools
from typing import Any

import triton

_num_compilations = 0


def num_compilations() -> int:
    """Return the number of variants so far."""
    return _num_compilations


@functools.cache
def count_compilations() -> None:
    """Count from now on. Safe to call twice."""
    hook = triton.knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> Any:
        global _num_compilations
        _num_compilations += 1
        return None if hook is None else hook(*args, **kwargs)

    triton.knobs.runtime.jit_post_compile_hook = count
