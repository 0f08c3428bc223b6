"""The options that say what a replica is, and those that say how a fleet serves it; as entries of a fleet file."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config.scaling_limits import ScalingLimits
from ..config.units import parse_amount

FLEET_PANEL = "Options of a fleet"
_LIMITS = ScalingLimits()


def engine_options(
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="int8 or fp8: make it of full-precision weights as they are read.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer together.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="KV memory a rank, for example 512MiB or 8GiB.")
    ] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="KV blocks, instead of KV memory.")] = None,
    num_host_kv_blocks: Annotated[
        int, typer.Option(help="KV blocks of host memory a rank, for what is preempted or evicted.")
    ] = 0,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="auto, or fp8_e4m3 or int8: half of the memory and less, close to full precision."),
    ] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens a step, prompts and answers together.")
    ] = 2048,
    max_queue_len: Annotated[
        int, typer.Option(help="Waiting requests beyond which new ones are refused.")
    ] = 4096,
    policy: Annotated[
        str, typer.Option(help="Who goes first: fcfs, priority, fair, shortest-prefill or longest-prefix.")
    ] = "fcfs",
    tenant_weight: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHARE", help="A tenant's share of the policy fair. May be repeated."),
    ] = None,
    step_timeout_s: Annotated[float, typer.Option(help="A step that takes longer has a hung rank.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where seeds of requests without one are drawn from.")] = 0,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep KV of prompts for later ones that begin alike.")
    ] = True,
    batch_invariant: Annotated[
        bool, typer.Option(help="GPU attention that no other request in the batch changes by a bit.")
    ] = False,
    fused_all_reduce: Annotated[
        bool,
        typer.Option(help="GPUs of one host sum few tokens themselves, without NCCL (not yet measured)."),
    ] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Record decode steps on a GPU and replay them.")] = True,
    audit: Annotated[bool, typer.Option(help="Recount every KV block after each step.")] = False,
) -> dict[str, Any]:
    """See `EngineOptions`."""
    options = dict(locals())
    weights = options.pop("tenant_weight") or ()
    options["tenant_weights"] = dict(parse_amount(text, "tenant weight", "gold=3") for text in weights)
    return options


def fleet_options(
    min_replicas: Annotated[
        int, typer.Option(help="Replicas at least; 0: none while nobody asks.", rich_help_panel=FLEET_PANEL)
    ] = _LIMITS.min_replicas,
    max_replicas: Annotated[
        int, typer.Option(help="Replicas at most.", rich_help_panel=FLEET_PANEL)
    ] = _LIMITS.max_replicas,
    target_wait_s: Annotated[
        float,
        typer.Option(
            help="How long a request may wait before its prompt is computed.", rich_help_panel=FLEET_PANEL
        ),
    ] = _LIMITS.target_wait_s,
    up_delay_s: Annotated[
        float,
        typer.Option(help="More replicas once they were wanted for so long.", rich_help_panel=FLEET_PANEL),
    ] = _LIMITS.up_delay_s,
    down_delay_s: Annotated[
        float,
        typer.Option(help="Fewer replicas once they were enough for so long.", rich_help_panel=FLEET_PANEL),
    ] = _LIMITS.down_delay_s,
    idle_timeout_s: Annotated[
        float,
        typer.Option(help="Without a request before the last replica goes.", rich_help_panel=FLEET_PANEL),
    ] = _LIMITS.idle_timeout_s,
    rank_resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=AMOUNT",
            help="Ray resource that each rank takes beside its GPU; CPU=4 gives it four threads. May be repeated.",
            rich_help_panel=FLEET_PANEL,
        ),
    ] = None,
    drain_grace_s: Annotated[
        float,
        typer.Option(
            help="How long requests may stay at a replica that drains.", rich_help_panel=FLEET_PANEL
        ),
    ] = 30.0,
    revision: Annotated[
        str, typer.Option(help="Any text; another one replaces all replicas.", rich_help_panel=FLEET_PANEL)
    ] = "",
) -> dict[str, Any]:
    """See `Deployment`."""
    options = dict(locals())
    resources = options.pop("rank_resource") or ()
    options["rank_resources"] = dict(parse_amount(text, "rank resource", "GPU=1") for text in resources)
    return options
