"""`quire serve`."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ...proto.errors import ConfigError


def serve(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face model directory, or `demo` for the bundled model.")
    ],
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 lets the system choose.")
    ] = "127.0.0.1:50051",
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
    audit: Annotated[bool, typer.Option(help="Recount every KV block after each step.")] = False,
    insecure: Annotated[
        bool, typer.Option(help="Let other machines connect without TLS and a token.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Tokens that callers may use, one a line: TOKEN or TENANT:TOKEN.")
    ] = None,
) -> None:
    """Serve a model until stopped.

    Example: `quire serve demo --tensor-parallel-size 2 --listen 127.0.0.1:0`
    """
    from ..serve import ServeOptions
    from ..serve import serve as run_server

    options = ServeOptions(
        model=model,
        served_model_name=served_model_name,
        tensor_parallel_size=tensor_parallel_size,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_memory=None if kv_cache_memory is None else parse_num_bytes(kv_cache_memory),
        num_kv_blocks=num_kv_blocks,
        num_host_kv_blocks=num_host_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue_len=max_queue_len,
        policy=policy,
        tenant_weights=tuple(map(parse_tenant_weight, tenant_weight or ())),
        step_timeout_s=step_timeout_s,
        seed=seed,
        prefix_caching=prefix_caching,
        batch_invariant=batch_invariant,
        audit=audit,
        listen=listen,
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        token_file=token_file,
    )
    raise typer.Exit(run_server(options))


def parse_num_bytes(text: str) -> int:
    """``512MiB``, ``8GB`` or plain bytes. Raises ConfigError on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"amount of memory is {text!r}, must be like 512MiB, 8GB or 1000000")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parse_tenant_weight(text: str) -> tuple[str, float]:
    """``NAME=SHARE``. Raises ConfigError on anything else."""
    name, _, share = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(share)
    raise ConfigError(f"tenant weight is {text!r}, must be NAME=SHARE, for example gold=3")
