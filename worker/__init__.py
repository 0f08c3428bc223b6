"""One tensor-parallel rank: its shard of the weights and of the KV cache, and the execution of steps.

The names below are what the rest of quire may import. They are imported at their first use, since some load torch.
"""

# ruff: noqa: I001  (isort gives each "X as X" a line of its own)
from __future__ import annotations

from typing import TYPE_CHECKING

from ..proto.lazy_names import lazy_names

if TYPE_CHECKING:  # the table below, for type checkers: X as X exports a name
    from .ahead.variants import compile_variants as compile_variants, record_variants as record_variants
    from .comm.communicator import SingleRank as SingleRank
    from .libraries.installed import LIBRARIES as LIBRARIES
    from .memory.host_memory import available_bytes as available_bytes
    from .memory.shared_segment import SegmentAddress as SegmentAddress, SharedSegment as SharedSegment
    from .models.slot_size import measure_slot as measure_slot
    from .models.weight_size import (
        WeightSize as WeightSize,
        make_meta_model as make_meta_model,
        measure_weights as measure_weights,
    )
    from .pooling.vectors import as_tensor as as_tensor
    from .rank.actor import (
        LoadReport as LoadReport,
        RankProcess as RankProcess,
        WorkerActor as WorkerActor,
        build_ops as build_ops,
    )
    from .rank.device import (
        compute_device as compute_device,
        cuda_device_count as cuda_device_count,
        on_device as on_device,
    )
    from .rank.ops_state import (
        LibraryState as LibraryState,
        cache_directory as cache_directory,
        library_state as library_state,
    )
    from .rank.runner import ModelRunner as ModelRunner
    from .rank.start_compilation import (
        NO_COMPILATION as NO_COMPILATION,
        compile_at_start as compile_at_start,
        with_few_blocks as with_few_blocks,
    )
    from .rank.start_log import StartRecord as StartRecord
    from .rank.step_executor import LaunchedStep as LaunchedStep
    from .structured.compilation import GrammarLibrary as GrammarLibrary
    from .structured.grammar import (
        GrammarSpec as GrammarSpec,
        UnsupportedConstraint as UnsupportedConstraint,
    )
    from .weights.weight_source import (
        NodePeers as NodePeers,
        WeightOrigin as WeightOrigin,
        WeightSource as WeightSource,
    )
else:
    __all__, __getattr__ = lazy_names(
        __name__,
        {
            ".ahead.variants": "compile_variants record_variants",
            ".comm.communicator": "SingleRank",
            ".libraries.installed": "LIBRARIES",
            ".memory.host_memory": "available_bytes",
            ".memory.shared_segment": "SegmentAddress SharedSegment",
            ".models.slot_size": "measure_slot",
            ".models.weight_size": "WeightSize make_meta_model measure_weights",
            ".pooling.vectors": "as_tensor",
            ".rank.actor": "LoadReport RankProcess WorkerActor build_ops",
            ".rank.device": "compute_device cuda_device_count on_device",
            ".rank.ops_state": "LibraryState cache_directory library_state",
            ".rank.runner": "ModelRunner",
            ".rank.start_compilation": "NO_COMPILATION compile_at_start with_few_blocks",
            ".rank.start_log": "StartRecord",
            ".rank.step_executor": "LaunchedStep",
            ".structured.compilation": "GrammarLibrary",
            ".structured.grammar": "GrammarSpec UnsupportedConstraint",
            ".weights.weight_source": "NodePeers WeightOrigin WeightSource",
        },
    )
