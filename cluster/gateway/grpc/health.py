"""HealthReporter: grpc.health.v1 of a gateway, for the server, its services and each of its models."""

from __future__ import annotations

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from ....proto import inference_pb2
from ..routing.served_models import ServedModels

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


def model_service(model: str) -> str:
    """Return the name under which the health of a model is known."""
    return f"{INFERENCE}/{model}"


class HealthReporter:
    """Sets the health of the services. The server and Inference are healthy while at least one model is.

    Args:
        servicer: serves what is set here.
    """

    def __init__(self, servicer: health.aio.HealthServicer, models: ServedModels) -> None:
        self._servicer = servicer
        self._models = models
        self._reported: dict[str, int] = {}

    async def report(self) -> None:
        """Set what has changed. A model that is not served any more is SERVICE_UNKNOWN."""
        models = {model_service(model.name): _status(model.is_ready) for model in self._models}
        is_ready = _status(self._models.is_ready)
        current = {health.OVERALL_HEALTH: is_ready, INFERENCE: is_ready} | models
        for service in self._reported.keys() - current.keys():
            current[service] = HealthCheckResponse.SERVICE_UNKNOWN
        for service, status in current.items():
            if self._reported.get(service) != status:
                self._reported[service] = status
                await self._servicer.set(service, status)


def _status(is_ready: bool) -> int:
    return HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
