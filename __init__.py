"""quire: distributed, tensor-parallel LLM serving.

Online, against a running server::

    from quire import Client, SamplingParams
    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=32)).text)

Offline, in this process::

    from quire import LLM, SamplingParams
    print(LLM(model="path/to/model").generate("Once upon a time")[0].outputs[0].text)

Names are loaded when first used, so that a client does not import torch and ``LLM`` on one rank does not import Ray.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.client.client import AsyncClient, Client
    from .cluster.offline.llm import LLM
    from .proto import errors
    from .proto.sampling import SamplingParams

__all__ = ["LLM", "AsyncClient", "Client", "SamplingParams", "errors"]

try:
    __version__ = version("quire")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "AsyncClient": ".cluster.client.client",
    "Client": ".cluster.client.client",
    "LLM": ".cluster.offline.llm",
    "SamplingParams": ".proto.sampling",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(".proto.errors", __name__)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
