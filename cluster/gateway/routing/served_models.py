"""ServedModels: the models that one gateway serves, by name. The set may change while the gateway runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ....proto.config import EngineConfig
from ....proto.errors import InvalidRequest, ModelNotFound
from ...fleet.replica.client import ReplicaClient
from ...os_utils.event_loop import ChangeNotifier
from ...text.media.fetch import ImageFetcher
from ...text.requests.request import RequestChecker
from ...text.requests.tokenizer import Tokenizer
from ...text.sandbox.grammar_workers import GrammarWorkers
from ...text.sandbox.image_workers import ImageWorkers
from ...text.sandbox.tokenizer_workers import TokenizerWorkers
from .replica_pool import ReplicaPool


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model and the replicas that run it.

    Attributes:
        image_workers: None for a model that reads text alone.
        image_fetcher: reads the images of URLs.
        scales_from_zero: the model may have no replica while idle; the first request starts one.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    checker: RequestChecker
    pool: ReplicaPool
    tokenizer_workers: TokenizerWorkers
    grammar_workers: GrammarWorkers
    image_workers: ImageWorkers | None = None
    image_fetcher: ImageFetcher = field(default_factory=lambda: ImageFetcher(()))
    scales_from_zero: bool = False

    @staticmethod
    def of(config: EngineConfig, tokenizer: Tokenizer, pool: ReplicaPool) -> ServedModel:
        """Return a model whose prompts are rendered and tokenized in processes of their own."""
        tokenizer_workers, grammar_workers = TokenizerWorkers(tokenizer), GrammarWorkers(config)
        image_workers = None if config.model.vision is None else ImageWorkers(config)
        checker = RequestChecker(config, tokenizer, tokenizer_workers, grammar_workers, image_workers)
        pool.adapters.configure(config.lora)
        fetcher = ImageFetcher(config.images.media_domains)
        return ServedModel(
            config, tokenizer, checker, pool, tokenizer_workers, grammar_workers, image_workers, fetcher
        )

    def resize(self, config: EngineConfig) -> None:
        """Check further requests against another configuration."""
        self.config = config
        self.checker = RequestChecker(
            config, self.tokenizer, self.tokenizer_workers, self.grammar_workers, self.image_workers
        )

    def start_workers(self) -> None:
        """Start the first process of those that prompts need, so that the first request does not wait for it."""
        self.tokenizer_workers.start()
        if self.image_workers is not None:
            self.image_workers.start()

    @property
    def name(self) -> str:
        return self.config.model.name

    @property
    def is_ready(self) -> bool:
        """A request would be served without an operator's help."""
        return self.pool.is_ready or self.scales_from_zero


class ServedModels:
    """name |-> ServedModel. For one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServedModel] = {}
        self._changes = ChangeNotifier()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._by_name.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, model: ServedModel) -> None:
        """Add a model, or replace the one of the same name."""
        self._by_name[model.name] = model
        self.notify_change()

    def remove(self, name: str) -> ServedModel:
        """Stop serving the model. Its running requests continue until its pool is closed."""
        model = self._by_name.pop(name)
        self.notify_change()
        return model

    def find(self, name: str) -> ServedModel:
        """Return the model of that name, or of an adapter of that name; an empty name selects the only model.

        Raises:
            ModelNotFound: the model is not served here.
            InvalidRequest: several models are served and the name is empty.
        """
        if name in self._by_name:
            return self._by_name[name]
        if (parent := self._parent_of(name)) is not None:
            return parent
        if not self._by_name:
            raise ModelNotFound("no model is served here yet")
        served = f"{' and '.join(map(repr, self._by_name))} {'is' if len(self._by_name) == 1 else 'are'}"
        if name:
            raise ModelNotFound(f"model {name!r} is not served here; {served}")
        if len(self._by_name) > 1:
            raise InvalidRequest("model", f"is missing where {served} served")
        return next(iter(self._by_name.values()))

    async def load_lora(self, model: str, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter of a model; an empty `model` selects the only one. See LoraRegistry.load."""
        parent = self.find(model)
        if name in self._by_name or self._parent_of(name) not in (None, parent):
            raise InvalidRequest("lora_name", f"is {name!r}, which is served already")
        async with parent.pool.reach() as reached:
            await parent.pool.adapters.load(reached.values(), name, path, replace=replace)
        self.notify_change()

    def unload_lora(self, name: str) -> None:
        """Unload an adapter. Raises ModelNotFound if there is no such adapter.

        Replicas that this gateway does not use hear of it from others, which learn it from a status.
        """
        parent = self._parent_of(name)
        if parent is None:
            raise ModelNotFound(f"adapter {name!r} is not loaded")
        parent.pool.adapters.unload(parent.pool.clients.values(), name)
        self.notify_change()

    def _parent_of(self, adapter: str) -> ServedModel | None:
        return next((model for model in self if model.pool.adapters.find(adapter) is not None), None)

    @property
    def is_ready(self) -> bool:
        return any(model.is_ready for model in self)

    def notify_change(self) -> None:
        """Wake waiters: a model or its readiness may have changed."""
        self._changes.notify()

    async def wait_for_change(self) -> None:
        await self._changes.wait()

    async def close(self) -> None:
        """Remove every model and end its running requests."""
        for model in self:
            await self.remove(model.name).pool.close()
            model.tokenizer_workers.close()
            model.grammar_workers.close()
            if model.image_workers is not None:
                model.image_workers.close()


def serve_single_replica(config: EngineConfig, tokenizer: Tokenizer, replica: ReplicaClient) -> ServedModels:
    """Return one model with one replica, whose client has been started."""
    models = ServedModels()
    pool = ReplicaPool(
        config.model.name,
        config.cache.block_size,
        sees_whole_prompt=config.model.sees_whole_prompt,
        on_change=models.notify_change,
    )
    pool.add(replica)
    models.add(ServedModel.of(config, tokenizer, pool))
    return models
