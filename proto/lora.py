"""LoRA adapters: how a request names one, and how the scheduler and the ranks speak about them.

The scheduler numbers the adapters that it has the ranks read. A rank reads an adapter into host memory on a thread of
its own and reports the end of it. An adapter in a *slot* of the device is used by the rows that name the slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .later_fields import sent_if_set

# Bounds of a LoraReference.
MAX_LORA_NAME_CHARS = 256
MAX_LORA_PATH_CHARS = 4096
# Adapters that a gateway and a replica know by name.
MAX_REGISTERED_LORAS = 1024
# The slot of a row without an adapter.
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class LoraReference:
    """An adapter as requests name it. Every replica can find the adapter by it.

    Attributes:
        name: the `model` of HTTP requests.
        path: its directory, on every node; empty in a registry's entry of an adapter that was unloaded.
        version: differs between loads of the same name, whose files may differ.
        content: digest of the files that replicas have read; empty if it is not known yet. It names the adapter's KV,
            so that this outlives the version, and is found under another name.
    """

    name: str
    path: str
    version: str = ""
    content: str = sent_if_set("", compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in (self.name, self.path, self.version)):
            raise ValueError("an adapter's name, path and version are text")

    @property
    def cache_key(self) -> str:
        """The part of prefix-cache roots that separates the adapter's KV from all other."""
        return f"\0{self.content}" if self.content else self.identity

    @property
    def identity(self) -> str:
        """The name of the adapter whether its content is known or not."""
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
        digest: digest of the content of the adapter's files; empty after an error.
        error: why the adapter cannot be used; empty if it can.
    """

    rank: int
    adapter_id: int
    digest: str = ""
    error: str = ""


def merge_references(
    registry: dict[str, LoraReference], entries: Iterable[LoraReference]
) -> list[LoraReference]:
    """Put entries of a later version into a registry, name |-> reference; return those of them that are new.

    The oldest entries of unloaded adapters are forgotten beyond MAX_REGISTERED_LORAS of them.
    """
    newer = []
    for entry in entries:
        known = registry.get(entry.name)
        if known is None or known.version < entry.version:
            registry[entry.name] = entry
            newer.append(entry)
        elif known == entry and not known.content:
            registry[entry.name] = entry  # whose content is known now
    unloaded = sorted(
        (entry for entry in registry.values() if not entry.path), key=lambda entry: entry.version
    )
    for entry in unloaded[: max(0, len(unloaded) - MAX_REGISTERED_LORAS)]:
        del registry[entry.name]
    return newer
