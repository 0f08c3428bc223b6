"""LoRA adapters: how a request names one, and how the scheduler and the ranks speak about them.

The scheduler numbers the adapters that it has the ranks read. A rank reads an adapter into host memory on a thread of
its own and reports the end of it. An adapter in a *slot* of the device is used by the rows that name the slot.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bounds of a LoraReference.
MAX_LORA_NAME_CHARS = 256
MAX_LORA_PATH_CHARS = 4096
# The slot of a row without an adapter.
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class LoraReference:
    """An adapter as requests name it. Every replica can find the adapter by it.

    Attributes:
        name: the `model` of HTTP requests.
        path: its directory, on every node.
        version: differs between loads of the same name, whose files may differ.
    """

    name: str
    path: str
    version: str = ""

    @property
    def cache_key(self) -> str:
        """The part of prefix-cache roots that separates the adapter's KV from all other."""
        return "\0".join((self.name, self.path, self.version))


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """An order to read an adapter into host memory.

    Attributes:
        adapter_id: the scheduler's number for it, which is never used again.
    """

    adapter_id: int
    path: str


@dataclass(frozen=True, slots=True)
class LoraReport:
    """The end of a LoraLoad on one rank.

    Attributes:
        digest: of the adapter's files, equal on all ranks that read the same ones; empty after an error.
        error: why the adapter cannot be used; empty if it can.
    """

    rank: int
    adapter_id: int
    digest: str = ""
    error: str = ""
