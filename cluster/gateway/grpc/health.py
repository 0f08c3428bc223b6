"""HealthService: grpc.health.v1 of a gateway, for the server, its services and each of its models."""

from __future__ import annotations

from collections import Counter

import grpc
import grpc.aio
from grpc_health.v1.health import OVERALL_HEALTH
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from ....proto import inference_pb2
from ....proto.errors import Overloaded
from ...os_utils.event_loop import ChangeNotifier
from ..routing.served_models import ServedModels
from .responses import Context, convert_errors, end_call, write_in_time

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
# A client watches each model at most once over a connection. Callers of health need no token.
MAX_WATCHERS_PER_CONNECTION = 128


def model_service(model: str) -> str:
    """Return the name under which the health of a model is known."""
    return f"{INFERENCE}/{model}"


class HealthService(HealthServicer):
    """grpc.health.v1. The server and Inference are healthy while at least one model is. For one event loop.

    Each watcher compares the current status with the one that it wrote last, and writes without a lock: a client that
    does not read delays no other one. (In the servicer of grpcio-health-checking it held up every change.)
    """

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._statuses: dict[str, int] = {}  # service |-> its status
        self._changes = ChangeNotifier()
        self._is_stopping = False
        self._num_watchers: Counter[str] = Counter()  # peer |-> watchers of its connection

    def report(self) -> None:
        """Take over what has changed of the models. A model that is not served any more is SERVICE_UNKNOWN."""
        is_ready = _status(self._models.is_ready)
        self._set(
            dict.fromkeys(self._statuses, HealthCheckResponse.SERVICE_UNKNOWN)
            | {OVERALL_HEALTH: is_ready, INFERENCE: is_ready}
            | {model_service(model.name): _status(model.is_ready) for model in self._models}
        )

    def stop(self) -> None:
        """Report NOT_SERVING from now on."""
        self._set(dict.fromkeys(self._statuses, HealthCheckResponse.NOT_SERVING))
        self._is_stopping = True

    async def Check(self, message: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = self._statuses.get(message.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=status)

    async def Watch(self, message: HealthCheckRequest, context: Context) -> None:
        peer = context.peer()
        if self._num_watchers[peer] >= MAX_WATCHERS_PER_CONNECTION:
            full = f"the connection has {MAX_WATCHERS_PER_CONNECTION} watchers of health already"
            await end_call(context, Overloaded(full))
        self._num_watchers[peer] += 1
        try:
            await self._watch(message, context)
        finally:
            self._num_watchers[peer] -= 1
            if not self._num_watchers[peer]:
                del self._num_watchers[peer]

    @convert_errors
    async def _watch(self, message: HealthCheckRequest, context: Context) -> None:
        written: int | None = None
        while True:
            status = self._statuses.get(message.service, HealthCheckResponse.SERVICE_UNKNOWN)
            if status == written:
                await self._changes.wait()
            else:
                await write_in_time(context, HealthCheckResponse(status=status))
                written = status

    def _set(self, statuses: dict[str, int]) -> None:
        if statuses != self._statuses and not self._is_stopping:
            self._statuses = statuses
            self._changes.notify()


def _status(is_ready: bool) -> int:
    return HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
