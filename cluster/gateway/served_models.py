"""ServedModels: what one gateway serves, by name. The table may change while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from ...proto.config import EngineConfig
from ...proto.errors import InvalidRequest, ModelNotFound
from ..replica.client import ReplicaClient
from ..requests.request import RequestChecker
from ..requests.tokenizer import Tokenizer
from .replica_pool import ReplicaPool


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model, and the replicas that run it.

    Attributes:
        can_be_woken: it may be without a replica while nobody asks, and gets one as soon as somebody does.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    checker: RequestChecker
    pool: ReplicaPool
    can_be_woken: bool = False

    @property
    def name(self) -> str:
        return self.config.model.name

    @property
    def is_ready(self) -> bool:
        """A request would be answered without an operator doing anything."""
        return self.pool.is_ready or self.can_be_woken


class ServedModels:
    """name |-> ServedModel. For one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServedModel] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._by_name.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, model: ServedModel) -> None:
        """A model more, or another description of one."""
        self._by_name[model.name] = model
        self.note_change()

    def remove(self, name: str) -> ServedModel:
        """The model is served no longer. What runs goes on until its pool is closed."""
        model = self._by_name.pop(name)
        self.note_change()
        return model

    def find(self, name: str) -> ServedModel:
        """The model that a request means; an empty name is that of the only one.

        Raises:
            ModelNotFound: it is not served here.
            InvalidRequest: several are, and the request names none.
        """
        if name in self._by_name:
            return self._by_name[name]
        if not self._by_name:
            raise ModelNotFound("no model is served here yet")
        served = f"{' and '.join(map(repr, self._by_name))} {'is' if len(self._by_name) == 1 else 'are'}"
        if name:
            raise ModelNotFound(f"model {name!r} is not served here; {served}")
        if len(self._by_name) > 1:
            raise InvalidRequest("model", f"is missing where {served} served")
        return next(iter(self._by_name.values()))

    @property
    def is_ready(self) -> bool:
        return any(model.is_ready for model in self)

    def note_change(self) -> None:
        """Something of what can be told of a model may have changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for_change(self) -> None:
        await self._changed.wait()

    async def close(self) -> None:
        """Ends what still runs."""
        for model in self:
            await self.remove(model.name).pool.close()


def serve_alone(config: EngineConfig, tokenizer: Tokenizer, replica: ReplicaClient) -> ServedModels:
    """One model on one replica, whose client has been started; with it, everything ends."""
    models = ServedModels()
    pool = ReplicaPool(
        config.model.name, config.cache.block_size, is_fixed=True, on_change=models.note_change
    )
    pool.add(replica)
    models.add(ServedModel(config, tokenizer, RequestChecker(config, tokenizer), pool))
    return models
