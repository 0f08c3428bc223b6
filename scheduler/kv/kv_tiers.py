"""KvTiers: the memories that hold the content of the KV cache."""

from __future__ import annotations

from enum import Flag, auto


class KvTiers(Flag):
    """Memories of all ranks whose content survived a failure of the worker group.

    Steps without a result may have left blocks half written in either; the scheduler knows these blocks.
    """

    NONE = 0
    DEVICE = auto()
    HOST = auto()
    ALL = DEVICE | HOST
