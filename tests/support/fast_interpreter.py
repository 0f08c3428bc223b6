"""Triton's interpreter without work that it repeats: it takes half of the time for the tests of attention.

The interpreter replaces the functions of triton.language at each launch, and again in each call of a device function,
which inspects all members of the language. It also builds a table of types for each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install() -> None:
    """Change the interpreter of this process. Its private names are the same in Triton 3.6 to 3.9."""
    from triton.runtime import interpreter

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _patch_once(
        interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._LangPatchScope
    )
    interpreter._get_np_dtype = _cache_by_name(interpreter._get_np_dtype)


def _patch_once(
    patch: Callable[..., Any], launch: Callable[..., Any], no_patches: Callable[[], Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `patch` and `launch` that patch the language once per launch and module of device functions."""
    patched: set[str] = set()

    def patch_first_call(function: Callable[..., Any]) -> Any:
        if function.__module__ in patched:
            return no_patches()
        patched.add(function.__module__)
        return patch(function)

    def launch_unpatched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return launch(executor, *args, **kwargs)
        finally:
            patched.clear()

    return patch_first_call, launch_unpatched


def _cache_by_name(find_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def find(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = find_dtype(dtype)
        return found[dtype.name]

    return find
