"""State of the C++ ops on this machine, for those who may not import kernels. Imports no torch."""

from __future__ import annotations

from ...kernels.native.build import LibraryState, cache_directory, library_state

__all__ = ["LibraryState", "cache_directory", "library_state"]
