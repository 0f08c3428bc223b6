"""quire: distributed, tensor-parallel LLM serving.

Online, against a running server::

    from quire import Client, SamplingParams
    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", SamplingParams(max_tokens=32)).outputs[0].text)

Offline, in this process::

    from quire import LLM, SamplingParams
    print(LLM(model="path/to/model").generate("Once upon a time")[0].outputs[0].text)

Names are imported at their first use, so that a client does not import torch and LLM on one rank does not import Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from .cluster.client.client import AsyncClient, Client
    from .cluster.client.wire.status import (
        BlockMapInfo,
        DeploymentInfo,
        FleetEvent,
        FleetInfo,
        LatencyInfo,
        LoraInfo,
        ModelInfo,
        ModelLoad,
        NodeInfo,
        ReplicaInfo,
        ServerInfo,
        TrafficInfo,
    )
    from .cluster.config.deployment import Deployment, ScalingLimits
    from .cluster.config.engine_options import EngineOptions
    from .cluster.offline.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from .cluster.offline.engine_arguments import EngineArgs
    from .cluster.offline.llm import LLM
    from .cluster.offline.prompts import LoRARequest, TextPrompt, TokensPrompt
    from .cluster.text.chat_format.deltas import (
        AssistantMessage,
        ChatDelta,
        ContentDelta,
        ReasoningDelta,
        ToolCall,
        ToolCallArguments,
        ToolCallStart,
    )
    from .cluster.text.requests.chat import Chat
    from .cluster.text.requests.outputs import (
        CompletionDelta,
        CompletionFinished,
        CompletionOutput,
        Logprob,
        PromptLogprobsDelta,
        RequestMetrics,
        RequestOutput,
        RequestStarted,
        StreamEvent,
        Usage,
    )
    from .cluster.text.requests.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from .proto import errors
    from .proto.pooling import PoolingParams
    from .proto.replica_status import KvCacheInfo, QueueInfo, RankStatus
    from .proto.sampling import SamplingParams
    from .proto.stream import Timings
    from .proto.structured_outputs import RepetitionDetectionParams, StructuredOutputsParams

_BEAMS = ".cluster.offline.beams"
_DELTAS = ".cluster.text.chat_format.deltas"
_OUTPUTS = ".cluster.text.requests.outputs"
_POOLING_OUTPUTS = ".cluster.text.requests.pooling"
_PROMPTS = ".cluster.offline.prompts"
_REPLICA_STATUS = ".proto.replica_status"
_STATUS = ".cluster.client.wire.status"
# exported name |-> module that defines it
_MODULES = {
    "LLM": ".cluster.offline.llm",
    "AssistantMessage": _DELTAS,
    "AsyncClient": ".cluster.client.client",
    "BeamSearchOutput": _BEAMS,
    "BeamSearchParams": _BEAMS,
    "BeamSearchSequence": _BEAMS,
    "BlockMapInfo": _STATUS,
    "Chat": ".cluster.text.requests.chat",
    "ChatDelta": _DELTAS,
    "ClassificationOutput": _POOLING_OUTPUTS,
    "ClassificationRequestOutput": _POOLING_OUTPUTS,
    "Client": ".cluster.client.client",
    "CompletionDelta": _OUTPUTS,
    "CompletionFinished": _OUTPUTS,
    "CompletionOutput": _OUTPUTS,
    "ContentDelta": _DELTAS,
    "Deployment": ".cluster.config.deployment",
    "DeploymentInfo": _STATUS,
    "EmbeddingOutput": _POOLING_OUTPUTS,
    "EmbeddingRequestOutput": _POOLING_OUTPUTS,
    "EngineArgs": ".cluster.offline.engine_arguments",
    "EngineOptions": ".cluster.config.engine_options",
    "FleetEvent": _STATUS,
    "FleetInfo": _STATUS,
    "KvCacheInfo": _REPLICA_STATUS,
    "LatencyInfo": _STATUS,
    "LoRARequest": ".cluster.offline.prompts",
    "LoraInfo": _STATUS,
    "Logprob": _OUTPUTS,
    "ModelInfo": _STATUS,
    "ModelLoad": _STATUS,
    "NodeInfo": _STATUS,
    "PoolingParams": ".proto.pooling",
    "PromptLogprobsDelta": _OUTPUTS,
    "QueueInfo": _REPLICA_STATUS,
    "RankStatus": _REPLICA_STATUS,
    "ReasoningDelta": _DELTAS,
    "RepetitionDetectionParams": ".proto.structured_outputs",
    "ReplicaInfo": _STATUS,
    "RequestMetrics": _OUTPUTS,
    "RequestOutput": _OUTPUTS,
    "RequestStarted": _OUTPUTS,
    "SamplingParams": ".proto.sampling",
    "ScalingLimits": ".cluster.config.deployment",
    "ScoringOutput": _POOLING_OUTPUTS,
    "ScoringRequestOutput": _POOLING_OUTPUTS,
    "ServerInfo": _STATUS,
    "StreamEvent": _OUTPUTS,
    "StructuredOutputsParams": ".proto.structured_outputs",
    "TextPrompt": _PROMPTS,
    "Timings": ".proto.stream",
    "TokensPrompt": _PROMPTS,
    "ToolCall": _DELTAS,
    "ToolCallArguments": _DELTAS,
    "ToolCallStart": _DELTAS,
    "TrafficInfo": _STATUS,
    "Usage": _OUTPUTS,
}

__all__ = [
    "LLM",
    "AssistantMessage",
    "AsyncClient",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockMapInfo",
    "Chat",
    "ChatDelta",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "Client",
    "CompletionDelta",
    "CompletionFinished",
    "CompletionOutput",
    "ContentDelta",
    "Deployment",
    "DeploymentInfo",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineOptions",
    "FleetEvent",
    "FleetInfo",
    "KvCacheInfo",
    "LatencyInfo",
    "LoRARequest",
    "Logprob",
    "LoraInfo",
    "ModelInfo",
    "ModelLoad",
    "NodeInfo",
    "PoolingParams",
    "PromptLogprobsDelta",
    "QueueInfo",
    "RankStatus",
    "ReasoningDelta",
    "RepetitionDetectionParams",
    "ReplicaInfo",
    "RequestMetrics",
    "RequestOutput",
    "RequestStarted",
    "SamplingParams",
    "ScalingLimits",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServerInfo",
    "StreamEvent",
    "StructuredOutputsParams",
    "TextPrompt",
    "Timings",
    "TokensPrompt",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "TrafficInfo",
    "Usage",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "errors":
        return import_module(".proto.errors", __name__)
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 25 ms, which few callers need

    try:
        return version("quire")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
