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

# ruff: noqa: I001  (isort gives each "X as X" a line of its own)
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .proto.lazy_names import lazy_names

if TYPE_CHECKING:  # the table below, for type checkers: X as X exports a name
    __version__: str
    from .cluster.client.client import AsyncClient as AsyncClient, Client as Client
    from .cluster.client.wire.status import (
        BlockMapInfo as BlockMapInfo,
        DeploymentInfo as DeploymentInfo,
        FleetEvent as FleetEvent,
        FleetInfo as FleetInfo,
        LatencyInfo as LatencyInfo,
        LoraInfo as LoraInfo,
        ModelInfo as ModelInfo,
        ModelLoad as ModelLoad,
        NodeInfo as NodeInfo,
        ReplicaInfo as ReplicaInfo,
        ServerInfo as ServerInfo,
        TrafficInfo as TrafficInfo,
    )
    from .cluster.config.deployment import Deployment as Deployment, ScalingLimits as ScalingLimits
    from .cluster.config.engine_options import EngineOptions as EngineOptions
    from .cluster.offline.beams import (
        BeamSearchOutput as BeamSearchOutput,
        BeamSearchParams as BeamSearchParams,
        BeamSearchSequence as BeamSearchSequence,
    )
    from .cluster.offline.async_engine import AsyncLLMEngine as AsyncLLMEngine, LLMEngine as LLMEngine
    from .cluster.offline.engine_arguments import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs
    from .cluster.offline.flat_logprobs import FlatLogprobs as FlatLogprobs
    from .cluster.offline.llm import LLM as LLM
    from .cluster.offline.prompts import (
        LoRARequest as LoRARequest,
        PromptType as PromptType,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from .cluster.text.chat_format.deltas import (
        AssistantMessage as AssistantMessage,
        ChatDelta as ChatDelta,
        ContentDelta as ContentDelta,
        ReasoningDelta as ReasoningDelta,
        ToolCall as ToolCall,
        ToolCallArguments as ToolCallArguments,
        ToolCallStart as ToolCallStart,
    )
    from .cluster.text.requests.chat import Chat as Chat
    from .cluster.text.requests.outputs import (
        CompletionDelta as CompletionDelta,
        CompletionFinished as CompletionFinished,
        CompletionOutput as CompletionOutput,
        Logprob as Logprob,
        PromptLogprobsDelta as PromptLogprobsDelta,
        RequestMetrics as RequestMetrics,
        RequestOutput as RequestOutput,
        RequestStarted as RequestStarted,
        StreamEvent as StreamEvent,
        Usage as Usage,
    )
    from .cluster.text.requests.pooling import (
        ClassificationOutput as ClassificationOutput,
        ClassificationRequestOutput as ClassificationRequestOutput,
        EmbeddingOutput as EmbeddingOutput,
        EmbeddingRequestOutput as EmbeddingRequestOutput,
        PoolingOutput as PoolingOutput,
        PoolingRequestOutput as PoolingRequestOutput,
        ScoringOutput as ScoringOutput,
        ScoringRequestOutput as ScoringRequestOutput,
    )
    from .proto import errors as errors
    from .proto.pooling import PoolingParams as PoolingParams
    from .proto.replica_status import (
        KvCacheInfo as KvCacheInfo,
        QueueInfo as QueueInfo,
        RankStatus as RankStatus,
    )
    from .proto.sampling import RequestOutputKind as RequestOutputKind, SamplingParams as SamplingParams
    from .proto.stream import Timings as Timings
    from .proto.structured_outputs import (
        RepetitionDetectionParams as RepetitionDetectionParams,
        StructuredOutputsParams as StructuredOutputsParams,
    )

# module |-> the names that it defines for users
_MODULES = {
    ".cluster.client.client": "AsyncClient Client",
    ".cluster.client.wire.status": (
        "BlockMapInfo DeploymentInfo FleetEvent FleetInfo LatencyInfo LoraInfo ModelInfo ModelLoad "
        "NodeInfo ReplicaInfo ServerInfo TrafficInfo"
    ),
    ".cluster.config.deployment": "Deployment ScalingLimits",
    ".cluster.config.engine_options": "EngineOptions",
    ".cluster.offline.beams": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    ".cluster.offline.async_engine": "AsyncLLMEngine LLMEngine",
    ".cluster.offline.engine_arguments": "AsyncEngineArgs EngineArgs",
    ".cluster.offline.flat_logprobs": "FlatLogprobs",
    ".cluster.offline.llm": "LLM",
    ".cluster.offline.prompts": "LoRARequest PromptType TextPrompt TokensPrompt",
    ".cluster.text.chat_format.deltas": (
        "AssistantMessage ChatDelta ContentDelta ReasoningDelta ToolCall ToolCallArguments ToolCallStart"
    ),
    ".cluster.text.requests.chat": "Chat",
    ".cluster.text.requests.outputs": (
        "CompletionDelta CompletionFinished CompletionOutput Logprob PromptLogprobsDelta RequestMetrics "
        "RequestOutput RequestStarted StreamEvent Usage"
    ),
    ".cluster.text.requests.pooling": (
        "ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput "
        "PoolingOutput PoolingRequestOutput "
        "ScoringOutput ScoringRequestOutput"
    ),
    ".proto.pooling": "PoolingParams",
    ".proto.replica_status": "KvCacheInfo QueueInfo RankStatus",
    ".proto.sampling": "RequestOutputKind SamplingParams",
    ".proto.stream": "Timings",
    ".proto.structured_outputs": "RepetitionDetectionParams StructuredOutputsParams",
}
_names, _load = lazy_names(__name__, _MODULES)

__all__ = [*_names, "errors"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "errors":
        return import_module(".proto.errors", __name__)
    return _load(name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 25 ms, which few callers need

    try:
        return version("quire")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
